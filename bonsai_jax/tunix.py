"""Rollouts for Tunix, Google's trainers for JAX (google-tunix on PyPI, which this module needs).

    from tunix.rl import rl_cluster
    from bonsai_jax import tunix

    policy = tunix.Policy(training.plan("model.gguf", "q1_0", pure=True))     # what Tunix trains
    engine = functools.partial(tunix.Rollout, max_batch_size=64)    # draws with the policy's packed weights
    config = rl_cluster.ClusterConfig(rollout_engine=engine, ...)

`Sampler` alone is Tunix's Sampler protocol on any engine.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.generate import base_sampler
from tunix.rl.rollout import base_rollout

from bonsai_jax import training
from bonsai_jax.choices import Remat
from bonsai_jax.decoding.steps import forward
from bonsai_jax.engine import Engine
from bonsai_jax.engine.answers import Output
from bonsai_jax.nnx import LanguageModel
from bonsai_jax.sampling_params import SamplingParams
from bonsai_jax.tokens.tokenizer import Tokenizer as ModelTokenizer

_rollout_logprobs = jax.jit(training.rollout_logprobs, static_argnames=("config", "run"))


class Tokenizer:
    """A model's tokenizer with the methods that Tunix calls.

    pad_id  the file's token for padding, else the end of sequence
    Raises ValueError for a tokenizer without an end of sequence.
    """

    def __init__(self, tokenizer: ModelTokenizer):
        if tokenizer.eos_id is None:
            raise ValueError("tokenizer: its file names no end of sequence (eos), which Tunix asks for")
        self.tokenizer, self._eos = tokenizer, tokenizer.eos_id
        self.apply_chat_template = tokenizer.apply_chat_template

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(ids)

    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id if self.tokenizer.add_bos else None

    def eos_id(self) -> int:
        return self._eos

    def pad_id(self) -> int:
        return self._eos if self.tokenizer.pad_id is None else self.tokenizer.pad_id


class Sampler(base_sampler.BaseSampler):
    """Tunix's Sampler on an engine, whose other requests run beside it.

    engine  with Engine(logprobs=0, sampled_logprobs=True) if log-probabilities are wanted
    """

    def __init__(self, engine: Engine):
        self.engine, self.tokenizer = engine, Tokenizer(engine.model.tokenizer)

    @property
    def transformer(self) -> LanguageModel:
        """The engine's model, a view of its packed weights."""
        return LanguageModel(self.engine.model)

    @property
    def transformer_state(self) -> nnx.State:
        return nnx.state(self.transformer)

    def tokenize(self, input_string: str) -> list[int]:
        return self.tokenizer.encode(input_string)

    def __call__(
        self,
        input_strings: str | Sequence[str],
        max_generation_steps: int,
        max_prompt_length: int | None = None,
        temperature: float = 0.0,
        top_p: float | None = None,
        top_k: int | None = None,
        beam_size: int | None = None,
        seed: int | jax.Array | None = None,
        multi_sampling: int = 1,
        return_logits: bool = False,
        echo: bool = False,
        pad_output: bool = False,
        return_logprobs: bool = False,
        eos_tokens: Sequence[int] | None = None,
    ) -> base_sampler.SamplerOutput:
        """Answers to prompts, as Tunix's own sampler gives them.

        max_prompt_length   width of the prompts that are returned, padded on the left; None, or less than the
                     longest: a power of two
        top_p        None: greedy, whatever the temperature is, as in Tunix
        top_k        None, 0 or less: all
        seed         None: another one at each call. Prompts get seed, seed + 1, ...
        multi_sampling   answers of each prompt, which share its pages; they come one after another
        echo         tokens and text begin with the prompt's
        pad_output   tokens are one array, padded on the right to max_generation_steps
        return_logprobs  of each drawn token, in the distribution that it was drawn from: after temperature,
                     top-k and top-p. Greedy: in the model's own
        eos_tokens   answers end before these too; before the model's own in any case
        Raises NotImplementedError for beam_size and return_logits.
        """
        if beam_size is not None:
            raise NotImplementedError("beam_size: engines do not search by beams; leave it out")
        if return_logits:
            raise NotImplementedError("return_logits: engines keep none; supported: return_logprobs=True")
        texts = [input_strings] if isinstance(input_strings, str) else input_strings
        prompts = [self.tokenize(text) for text in texts]
        first, drawing = _number(seed), _drawing(temperature, top_p, top_k)
        handles = [
            self.engine.submit(
                prompt,
                dataclasses.replace(drawing, seed=None if first is None else first + i * multi_sampling),
                max_new_tokens=max_generation_steps,
                n=multi_sampling,
                logprobs=0 if return_logprobs else None,
            )
            for i, prompt in enumerate(prompts)
        ]
        outputs = [output for handle in handles for output in handle.results()]
        prompts = [prompt for prompt in prompts for _ in range(multi_sampling)]
        ends = [_end(output.tokens, eos_tokens or ()) for output in outputs]
        rows = [output.tokens[:end] for output, end in zip(outputs, ends, strict=True)]
        width, longest = max_prompt_length or 0, max(map(len, prompts))
        width = width if width >= longest else 1 << (longest - 1).bit_length()
        most = max_generation_steps
        if echo:
            rows, most = [p + row for p, row in zip(prompts, rows, strict=True)], width + most
        pad = self.tokenizer.pad_id()
        logprobs = [_logprobs(o, drawing)[:end] for o, end in zip(outputs, ends, strict=True)]
        if pad_output:
            logprobs = [row + [0.0] * (max_generation_steps - len(row)) for row in logprobs]
        return base_sampler.SamplerOutput(
            text=[self.tokenizer.decode(row) for row in rows],
            logits=None,
            tokens=_padded(rows, most, pad) if pad_output else [np.array(row, np.int32) for row in rows],
            padded_prompt_tokens=_padded(prompts, width, pad, left=True),
            logprobs=logprobs if return_logprobs else None,
        )


class Policy(nnx.Module):
    """A model as Tunix trains it: float32 parameters by tensor name, rounded to the plan's formats in each
    forward pass (straight-through).

    plan   training.plan(...)
    remat  as for `bj.forward`
    """

    def __init__(self, plan: training.TrainingPlan, *, remat: Remat = False):
        self.plan, self.config, self.remat = plan, plan.config, remat
        self.weights = nnx.Dict({name: nnx.Param(w) for name, w in plan.weights().items()})

    def arrays(self) -> training.Weights:
        """The parameters, as `plan` takes them."""
        return {name: param[...] for name, param in self.weights.items()}

    def __call__(
        self,
        input_tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: None = None,
        attention_mask: Any = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Logits after every token, those of padding mean nothing. Where the padding on the left ends is seen
        in positions, so the mask is not needed: each token attends to all before it."""
        start = jnp.maximum(jnp.argmax(positions > 0, axis=1) - 1, 0)
        lengths = input_tokens.shape[1] - start
        params = self.plan.rounded(self.arrays())
        logits, _ = forward(params, _moved(input_tokens, start), lengths, self.config, remat=self.remat)
        return _moved(logits, -start), None


class Rollout(base_rollout.BaseRollout):
    """Tunix's rollout worker for a `Policy`: an engine with its packed weights. RLCluster makes one of
    ClusterConfig(rollout_engine=Rollout), or of functools.partial(Rollout, ...) with arguments of `Engine`.

    rollout_actor, tokenizer, mesh, rollout_config   as RLCluster gives them. One device; offload_to_cpu=True
                     of the cluster is not supported
    """

    def __init__(
        self,
        rollout_actor: Policy,
        tokenizer: Any = None,
        mesh: Any = None,
        rollout_config: Any = None,
        **options: Any,
    ):
        self._packed = jax.jit(rollout_actor.plan.packed)
        model = rollout_actor.plan.model(rollout_actor.arrays())
        self.engine = Engine(model, logprobs=0, sampled_logprobs=True, **options)
        self.sampler = Sampler(self.engine)

    def generate(
        self, prompts: list[str], rollout_config: base_rollout.RolloutConfig, **kwargs: Any
    ) -> base_rollout.RolloutOutput:
        output = self.sampler(
            prompts,
            max_generation_steps=rollout_config.max_tokens_to_generate,
            max_prompt_length=rollout_config.max_prompt_length,
            temperature=rollout_config.temperature,
            top_p=rollout_config.top_p,
            top_k=rollout_config.top_k,
            seed=rollout_config.seed,
            eos_tokens=rollout_config.eos_tokens,
            return_logprobs=rollout_config.return_logprobs,
        )
        return base_rollout.RolloutOutput(
            text=output.text,
            logits=output.logits,
            tokens=output.tokens,
            left_padded_prompt_tokens=output.padded_prompt_tokens,
            logprobs=output.logprobs,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """log p of each token of the completions, by the programs that drew them (rollout_logprobs)."""
        texts = jnp.concatenate([prompt_tokens, completion_tokens], axis=1)
        start = jnp.argmax(texts != self.pad_id(), axis=1)
        model, lengths = self.engine.model, texts.shape[1] - start
        values = _rollout_logprobs(
            model.params, _moved(texts, start), lengths, config=model.config, run=model.run
        )
        return _moved(jnp.pad(values, ((0, 0), (1, 0))), -start)[:, prompt_tokens.shape[1] :]

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Go on with these parameters of the policy, an nnx.State, between two steps of the engine."""
        self.engine.update_params(self._packed(nnx.to_pure_dict(params)["weights"]))

    def pad_id(self) -> int:
        return self.sampler.tokenizer.pad_id()

    def eos_id(self) -> int:
        return self.sampler.tokenizer.eos_id()

    def model(self) -> None:
        """None: the engine shares no parameters with the policy, so Tunix gives it those of each step."""


def _drawing(temperature: float, top_p: float | None, top_k: int | None) -> SamplingParams:
    """Tunix's order: temperature, top-k, top-p; without a top-p it is greedy."""
    temperature, top_p = (0.0, 1.0) if top_p is None else (temperature, top_p)
    top_k = max(top_k or 0, 0)
    return SamplingParams(temperature, top_k=top_k, top_p=top_p, min_p=0.0, temperature_first=True)


def _number(seed: int | jax.Array | None) -> int | None:
    """A seed of Tunix's: a number, or a key of jax."""
    if seed is None or isinstance(seed, int):
        return seed
    key = jax.random.key_data(seed) if jnp.issubdtype(seed.dtype, jax.dtypes.prng_key) else seed
    return int(np.asarray(key).ravel()[-1])


def _end(tokens: Sequence[int], ends: Sequence[int]) -> int:
    """How many tokens come before the first of ends."""
    return next((i for i, token in enumerate(tokens) if token in ends), len(tokens))


def _logprobs(output: Output, drawing: SamplingParams) -> list[float]:
    """log p of its tokens in the distribution that they were drawn from; of the model where that is none."""
    if output.logprobs is None:
        return []
    drawn = output.logprobs.token if drawing.temperature == 0 else output.logprobs.sampled
    if drawn is None:
        raise ValueError("return_logprobs: make the engine with sampled_logprobs=True")
    return [float(value) for value in drawn]


def _padded(rows: Sequence[Sequence[int]], width: int, pad: int, *, left: bool = False) -> np.ndarray:
    """int32 [rows, width]"""
    sides = [(width - len(row), 0) if left else (0, width - len(row)) for row in rows]
    pairs = zip(rows, sides, strict=True)
    return np.stack([np.pad(np.array(row, np.int32), side, constant_values=pad) for row, side in pairs])


def _moved(x: Array, by: Int[Array, "B"]) -> Array:
    """Rows [B, T, ...] moved to the left by so many places, around the end."""
    at = (jnp.arange(x.shape[1]) + by[:, None]) % x.shape[1]
    return jnp.take_along_axis(x, at.reshape(at.shape + (1,) * (x.ndim - 2)), axis=1)
