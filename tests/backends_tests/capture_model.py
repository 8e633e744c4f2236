"""What a stream capture does with launches, events and waits, as CUDA documents it and as it was seen on a GPU."""

from __future__ import annotations

Dependency = tuple[object, str]  # node, kind of the edge that it would give


class CaptureError(Exception):
    """A call that the driver would refuse."""


class CaptureModel:
    """One capture. Streams, events and nodes are any hashable values."""

    def __init__(self, origin: object) -> None:
        self.origin = origin
        self.waiting: dict[object, set[Dependency]] = {origin: set()}
        self.tokens: dict[object, set[Dependency]] = {}
        self.edges: set[tuple[object, object, str]] = set()

    def launch(
        self, stream: object, node: object, *, early: bool = False, event: object = None, kind: str = ""
    ) -> None:
        """A launch on a stream; `event` is what the launch itself signals, as `kind`."""
        if stream not in self.waiting:
            raise CaptureError(f"{node} is launched on stream {stream}, which has not forked from the origin")
        for producer, held in self.waiting[stream]:
            if early and held == "launch_completion":
                raise CaptureError(f"nobody knows what serialization makes of {producer} -> {node}")
            self.edges.add((producer, node, "programmatic" if early else held))
        self.waiting[stream] = {(node, "ordinary")}
        if event is not None:
            self.tokens[event] = {(node, kind)}

    def record(self, stream: object, event: object) -> None:
        if stream not in self.waiting:
            raise CaptureError(f"{event} is recorded on stream {stream}, which has not forked from the origin")
        self.tokens[event] = set(self.waiting[stream])

    def wait(self, stream: object, event: object) -> None:
        if event not in self.tokens:
            raise CaptureError(f"stream {stream} waits for {event}, which was not recorded")
        self.waiting[stream] = self.waiting.get(stream, set()) | self.tokens[event]

    def end(self) -> set[tuple[object, object, str]]:
        """The edges. Each stream must have joined the origin by ordinary edges: the strictest reading of the manual."""
        joined = {node for node, kind in self.waiting[self.origin] if kind == "ordinary"}
        frontier = list(joined)
        while frontier:
            node = frontier.pop()
            for producer, consumer, kind in self.edges:
                if consumer == node and kind == "ordinary" and producer not in joined:
                    joined.add(producer)
                    frontier.append(producer)
        for stream, waiting in self.waiting.items():
            for node, kind in waiting:
                if kind != "ordinary" or node not in joined:
                    raise CaptureError(f"stream {stream} has not joined the origin after {node}")
        return self.edges
