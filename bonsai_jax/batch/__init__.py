"""A file of requests to a file of answers, both in OpenAI's batch format (docs/batch.md).

run.py        runs a batch: all lines that the output does not answer yet, many at once
lines.py      reads and checks lines of the input
requests.py   checks a request's body field by field
answers.py    answers lines with an Engine
objects.py    turns Outputs into OpenAI's response objects
results.py    reads the output, and appends lines to it
on_ray.py     answers lines with Ray actors that each have an Engine
"""

from bonsai_jax.batch.answers import Job
from bonsai_jax.batch.run import Report, run

__all__ = ["Job", "Report", "run"]
