"""What could not be recorded, and why.

A recorder runs inside other people's models and must not stop them: where an error of its own
occurs, it leaves out the place. The errors are reported once, when the block ends, since warnings
may be configured to raise.
"""

from __future__ import annotations

MOST_REASON = 400
"""The most characters of an error that are reported."""


class LeftOut:
    """The names of places that were left out, each with its reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._reasons

    def __bool__(self) -> bool:
        return bool(self._reasons)

    def add(self, name: str, error: Exception) -> None:
        self._reasons[name] = f"{type(error).__name__}: {error}"[:MOST_REASON]

    def notes(self) -> list[str]:
        """A sentence for each reason."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in self._reasons.items():
            by_reason.setdefault(reason, []).append(name)
        return [
            f"{', '.join(names)} could not be recorded ({reason}); the model ran as without"
            for reason, names in by_reason.items()
        ]
