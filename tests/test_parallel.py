"""Many devices, on a CPU: the number of its devices is fixed when JAX starts, so a process of its own runs
them."""

import os
import subprocess
import sys
from pathlib import Path


def test_eight_devices():
    """on_eight_devices.py; alone: XLA_FLAGS=--xla_force_host_platform_device_count=8 pytest
    tests/on_eight_devices.py"""
    here = Path(__file__).parent
    # Unoptimized code: compiling is most of the time.
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(here / "on_eight_devices.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=here.parent, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
