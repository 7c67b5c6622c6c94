"""Adapters in folders as PEFT itself reads and writes them."""

import numpy as np
import pytest

import bonsai_jax as bj
from bonsai_jax.network import architectures
from checkpoints import open_checkpoint
from tests.bonsai_jax import test_transformers
from tests.bonsai_jax.tiny_files import logits

LENGTH = 20


def theirs(oracle) -> np.ndarray:
    import torch

    with torch.no_grad():
        return oracle(torch.tensor([test_transformers.prompt(LENGTH)]), use_cache=False).logits[0].numpy()


def ours(folder, adapter) -> np.ndarray:
    return logits(open_checkpoint(str(folder)), test_transformers.prompt(LENGTH), adapter)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "phi3", "glm4", "ernie4_5"])
def test_a_folder_of_pefts_has_its_logits_and_ours_too(name, tmp_path):
    torch, peft = pytest.importorskip("torch"), pytest.importorskip("peft")
    oracle = test_transformers.model(name)
    oracle.save_pretrained(tmp_path / "model")
    config = architectures.config_of(open_checkpoint(str(tmp_path / "model")))
    matrices = [n.rpartition(".")[-1] for n, m in oracle.named_modules() if isinstance(m, torch.nn.Linear)]
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=sorted({*matrices} - {"lm_head"}), task_type="CAUSAL_LM",
        use_rslora=True,
    )  # fmt: skip
    before = theirs(oracle)
    adapted = peft.get_peft_model(oracle, settings)
    torch.manual_seed(1)
    for key, values in adapted.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(values, std=0.2)
    adapted.save_pretrained(tmp_path / "theirs")
    expected = theirs(adapted)
    assert np.abs(expected - before).max() > 0.1 * before.std()
    adapter = bj.load_adapter(tmp_path / "theirs", config)
    np.testing.assert_allclose(ours(tmp_path / "model", adapter), expected, atol=1e-4 * before.std())

    bj.save_adapter(tmp_path / "ours", adapter, config)
    again = peft.PeftModel.from_pretrained(test_transformers.model(name), tmp_path / "ours")
    np.testing.assert_allclose(theirs(again), expected, atol=1e-4 * before.std())
