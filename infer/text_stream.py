"""Text of tokens as they come, never showing half a character."""

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
