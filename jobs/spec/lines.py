"""Framing of the channel: one message per line, with a limit that a peer must earn.

Used at both ends. asyncio's own limit is fixed for a stream's life, so whoever may send a long line might
send it before having proved who he is.
"""
import asyncio

UNPROVEN_LIMIT = 8 * 2**10  # a greeting needs a few hundred bytes
PROVEN_LIMIT = 64 * 2**20  # a job spec, a traceback
CHUNK = 64 * 2**10


class Lines:
    """Reads lines of at most `limit` bytes; raise the limit once the peer is known."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self.limit = UNPROVEN_LIMIT
        self._reader = reader
        self._buffer = bytearray()

    async def next(self) -> bytes:
        """The next line without its newline; empty at the end. Raises ConnectionError for a line that is too long."""
        scanned = 0
        while (end := self._buffer.find(b"\n", scanned)) < 0:
            if len(self._buffer) > self.limit:
                raise ConnectionError(f"a line of more than {self.limit} bytes")
            scanned = len(self._buffer)
            chunk = await self._reader.read(CHUNK)
            if not chunk:
                return b""
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[:end + 1]
        return line
