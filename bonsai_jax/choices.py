"""The values that named settings may have. RunConfig (config.py) and the command line both take them from
this file, which imports nothing heavy, so that `bonsai-jax --help` answers at once."""

from typing import Literal

Impl = Literal["auto", "reference", "pallas"]
# After "auto", the candidates for a decode step in pallas_kernels/selection.py, in its order of preference.
Schedule = Literal["auto", "one_launch", "layer_products", "int_launches", "layer_gemms", "launches"]
WeightStorage = Literal["auto", "packed", "decoded"]
ActivationBits = Literal[8, 16]
AllReduce = Literal["auto", "psum", "mailbox"]
CacheDtype = Literal["float32", "bfloat16", "float16", "int8"]  # files of pallas_kernels/cache_layouts
StateDtype = Literal["float32", "float16"]
Remat = bool | Literal["offload"]  # what is computed again for gradients: bj.forward
Pooling = Literal["mean", "last"]  # how embed_texts makes one vector of a text
