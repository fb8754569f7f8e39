"""Running a server in this process."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

from rkr.serve.app import build_app
from rkr.serve.server import Server

SHUTDOWN = 5  # seconds in which what was accepted is answered, before the engine ends
IDLE = 30  # seconds in which a connection must bring the head of a request


def run(server: Server, host: str, port: int) -> None:
    """Serve until a signal comes. What was accepted is answered first."""
    import uvicorn
    from PIL import Image

    warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # such pictures are refused

    class Listening(uvicorn.Server):
        """Says where it listens, and closes connections that ask for nothing, or too slowly."""

        idle: Mapping[tuple[Any, Any], float] = {}  # since when, by connection and its last request

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            for one in self.servers if self.started else ():
                for socket in one.sockets:
                    name, number = socket.getsockname()[:2]
                    server.tell("listening", url=f"http://{f'[{name}]' if ':' in name else name}:{number}")

        async def on_tick(self, counter: int) -> bool:
            now = time.monotonic()
            connections: Any = self.server_state.connections
            found = [(one, one.cycle) for one in connections if one.cycle is None or one.cycle.response_complete]
            self.idle = {key: self.idle.get(key, now) for key in found}
            for (connection, _), since in self.idle.items():
                if now - since > IDLE:
                    connection.transport.close()
            return await super().on_tick(counter)

        async def shutdown(self, sockets: Any = None) -> None:
            server.engine.hurry()
            await super().shutdown(sockets)

    config = uvicorn.Config(
        build_app(server),
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=SHUTDOWN,
        timeout_keep_alive=IDLE,
        backlog=1024,
        ws="none",
    )
    Listening(config).run()
