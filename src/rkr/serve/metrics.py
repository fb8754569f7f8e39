"""What a server measures: for Prometheus, and for the live view of its page."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest

from rkr.serve.engine import Batch

WINDOW = 10.0  # seconds that the live view looks back
SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


class Metrics:
    """Counts requests and batches.

    Args:
        waiting: Tells how many pictures wait.
        tasks: Tells how many tasks there are.
    """

    def __init__(self, waiting: Callable[[], int], tasks: Callable[[], int]) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self._requests = Counter(
            "rkr_requests", "Requests by what they ask for and by status.", ("route", "status"), registry=registry
        )
        self._seconds = Histogram("rkr_request_seconds", "From a request to its answer.", ("route",), registry=registry)
        self._pictures = Counter("rkr_pictures", "Pictures that were computed.", registry=registry)
        self._sizes = Histogram("rkr_batch_pictures", "Pictures in a batch.", buckets=SIZES, registry=registry)
        self._mixed = Histogram("rkr_batch_tasks", "Tasks in a batch.", buckets=SIZES, registry=registry)
        self._compute = Histogram("rkr_batch_seconds", "Computing of a batch.", registry=registry)
        Gauge("rkr_waiting_pictures", "Pictures that wait for an answer.", registry=registry).set_function(waiting)
        Gauge("rkr_tasks", "Tasks that are served.", registry=registry).set_function(tasks)
        self._waiting, self._tasks = waiting, tasks
        self._lock = threading.Lock()
        self._latencies: deque[tuple[float, float]] = deque(maxlen=20_000)
        self._batches: deque[tuple[float, Batch]] = deque(maxlen=20_000)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request."""
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)
        if route == "/v1/predict" and status == 200:
            with self._lock:
                self._latencies.append((time.monotonic(), seconds))

    def batch(self, batch: Batch) -> None:
        """Count a batch."""
        self._pictures.inc(batch.pictures)
        self._sizes.observe(batch.pictures)
        self._mixed.observe(batch.tasks)
        self._compute.observe(batch.seconds)
        with self._lock:
            self._batches.append((time.monotonic(), batch))

    def text(self) -> bytes:
        """For Prometheus."""
        return generate_latest(self.registry)

    def live(self) -> dict[str, Any]:
        """The last seconds."""
        since = time.monotonic() - WINDOW
        with self._lock:
            latencies = sorted(1000 * value for at, value in self._latencies if at >= since)
            batches = [value for at, value in self._batches if at >= since]

        def mean(values: list[int]) -> float:
            return round(statistics.fmean(values), 2) if values else 0.0

        def quantile(share: float) -> float | None:
            return round(latencies[min(len(latencies) - 1, int(share * len(latencies)))], 2) if latencies else None

        return {
            "seconds": WINDOW,
            "requests_per_second": round(len(latencies) / WINDOW, 2),
            "pictures_per_second": round(sum(b.pictures for b in batches) / WINDOW, 2),
            "median_ms": quantile(0.5),
            "p99_ms": quantile(0.99),
            "batch_pictures": mean([b.pictures for b in batches]),
            "batch_tasks": mean([b.tasks for b in batches]),
            "waiting": self._waiting(),
            "tasks": self._tasks(),
        }
