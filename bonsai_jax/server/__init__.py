"""An HTTP server whose APIs other programs already know (docs/server.md).

    HTTP body --protocol.request--> Request --submissions--> Engine.submit --> Handle
      pieces --answers.Parser--> Parts --protocol.whole, protocol.Stream--> JSON, or server-sent events

run.py         a socket, uvicorn, signals: from start to the last answer
app.py         routes, and what they share: a Service
service.py     Service: the engine, the limits, who is being answered
settings.py    Settings: what the command line says
connections.py uvicorn's connections, which do not wait for ever
door.py        before any route: keys, hosts, origins; after it: errors, one line in the log
bodies.py      a body's bytes to JSON, within limits
answering.py   Answering: a Request's answer, whole or as events
responses.py   JSON, and streams of events that end when the client leaves
metrics.py     what /metrics shows
openapi.py     the description at /openapi.json
routes_*.py    routes that are no protocol: models, tokens, embeddings, health, the page at /
page/          the page's HTML, CSS and JavaScript

What a body means, and what an answer looks like: bonsai_jax/protocols. An API is one file of it and one line
in app.py.
"""

from bonsai_jax.server.run import Running, running, serve
from bonsai_jax.server.settings import Settings

__all__ = ["Running", "Settings", "running", "serve"]
