"""A 1-bit model of our own, in this package: 33.6 million weights in 7 MB that continue simple stories.

docs/stories.md says how it was made, and how good it is.
"""

from pathlib import Path

NAME = "stories"
PATH = Path(__file__).with_name("stories.gguf")
