"""When to ask SGLang for `/server_info`. Pure: time is an argument."""

from __future__ import annotations

INFO_RETRY_SECONDS = (15.0, 300.0)


class Inquiry:
    """When to ask for `/server_info`: once after each start; without an answer again, after growing pauses."""

    def __init__(self) -> None:
        self._due: float | None = 0.0
        self._pause = INFO_RETRY_SECONDS[0]

    def want(self) -> None:
        """Ask again: the server may have restarted, so earlier answers may be outdated."""
        self._due, self._pause = 0.0, INFO_RETRY_SECONDS[0]

    def take(self, now: float) -> bool:
        """Return whether to ask now; the caller must then ask."""
        due = self._due is not None and now >= self._due
        if due:
            self._due = None
        return due

    def missed(self, now: float) -> None:
        """Note that there was no answer."""
        if self._due is None:
            self._due = now + self._pause
            self._pause = min(2 * self._pause, INFO_RETRY_SECONDS[1])
