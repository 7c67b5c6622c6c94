"""A file of requests to a file of answers, both in OpenAI's batch format (docs/batch.md).

run.py        all of it: what is done already, then every other line, many at once
lines.py      a line of the input: read, checked, and refused by name
requests.py   a request's body, checked field by field
answers.py    a line to its answer, by an Engine
objects.py    Outputs as the objects that OpenAI answers with
results.py    the output: what is in it, and one line more
on_ray.py     a line to its answer, by actors that each have an Engine
"""

from bonsai_jax.batch.answers import Job
from bonsai_jax.batch.run import Report, run

__all__ = ["Job", "Report", "run"]
