"""Text of tokens as they come, never showing half a character."""

from collections.abc import Sequence

from nosa_jax.tokenizer import Tokenizer

_INCOMPLETE = "\ufffd"  # what decoding gives for bytes that are not (yet) a character


class TextStream:
    """Turns tokens into text one at a time; the pieces joined are the text of all tokens.

    A tokenizer may need its neighbours to spell a token (a leading space, the other bytes of a character), so the
    tokens of the last piece are decoded again with the new one, and a piece is held back while it ends in bytes that
    are no character yet.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # those of the last piece, then those not shown yet
        self._shown = 0  # how many of them belong to the last piece

    def push(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        self._tokens.append(token)
        text = self._new_text()
        if not text or text.endswith(_INCOMPLETE):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return text

    def flush(self) -> str:
        """What was held back, at the end."""
        text = self._new_text()
        self._tokens, self._shown = [], 0
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._tokens[: self._shown])
        return self._tokenizer.decode(self._tokens)[len(before) :]


class StoppingStream:
    """A TextStream that ends before the first of some strings, wherever tokens begin and end within it.

    Text that may be the beginning of such a string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        """What was shown so far."""
        self.stopped = False
        """Whether one of the strings has come; what follows is no longer shown."""

    def push(self, token: int) -> str:
        """The text that is certain now; may be empty."""
        return self._show(self._stream.push(token))

    def flush(self) -> str:
        """What was held back, at the end."""
        shown = self._show(self._stream.flush())
        rest, self._held = self._held, ""
        self.text += rest
        return shown + rest

    def _show(self, piece: str) -> str:
        if self.stopped:
            return ""
        self._held += piece
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        if found:
            self.stopped = True
            shown, self._held = self._held[: min(found)], ""
        else:
            certain = len(self._held) - max((_overlap(self._held, s) for s in self._stop), default=0)
            shown, self._held = self._held[:certain], self._held[certain:]
        self.text += shown
        return shown


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that `stop` begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
