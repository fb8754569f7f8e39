"""Ray clusters of several nodes on this machine."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

from ray import cluster_utils
from ray._private import services

SECONDS = 300.0  # machines that run tests are busy; Ray itself waits for 30


class Cluster(cluster_utils.Cluster):
    """Waits for its nodes as long as they need."""

    def add_node(self, *words: Any, **options: Any) -> Any:
        """Start a node."""
        ask = services.get_node

        def get_node(*where: Any) -> Any:
            end = time.monotonic() + SECONDS
            while True:
                try:
                    return ask(*where)
                except RuntimeError:  # it is not there yet
                    if time.monotonic() > end:
                        raise
                    time.sleep(0.1)

        with mock.patch.object(services, "get_node", get_node):
            return super().add_node(*words, **options)

    def _wait_for_node(self, node: Any, timeout: float = SECONDS) -> None:
        super()._wait_for_node(node, timeout)
