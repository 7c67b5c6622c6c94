"""A file of requests to a file of answers, both in OpenAI's batch format (docs/batch.md).

run.py        runs a batch: all lines that the output does not answer yet, many at once
lines.py      reads and checks lines of the input
answers.py    answers lines with an Engine
results.py    reads the output, and appends lines to it
on_ray.py     answers lines with Ray actors that each have an Engine

What a request means and what its answer looks like: bonsai_jax/protocols.
"""

from bonsai_jax.batch.answers import Job
from bonsai_jax.batch.run import Report, run

__all__ = ["Job", "Report", "run"]
