"""Running a server in this process."""

from __future__ import annotations

import warnings
from typing import Any

from rkr.serve.app import build_app
from rkr.serve.server import Server

SHUTDOWN = 5  # seconds in which what was accepted is answered, before the engine ends


def run(server: Server, host: str, port: int) -> None:
    """Serve until a signal comes. What was accepted is answered first."""
    import uvicorn
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such pictures are refused

    class Listening(uvicorn.Server):
        """Says where it listens."""

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for one in self.servers if self.started else ():
                for socket in one.sockets:
                    name, number = socket.getsockname()[:2]
                    server.tell("listening", url=f"http://{f'[{name}]' if ':' in name else name}:{number}")

    config = uvicorn.Config(
        build_app(server),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN,
        timeout_keep_alive=30,
        backlog=1024,
    )
    Listening(config).run()
