"""Messages to text by a model's own chat template.

Templates are Jinja programs that come with a checkpoint, so they run in a sandbox that lets them neither call Python
nor change what they are given. The names they may use are those that `transformers` offers
(https://huggingface.co/docs/transformers/chat_templating).
"""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from nosa_jax.errors import InputError
from nosa_jax.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""A turn of a conversation: `role` ("system", "user", "assistant") and `content`, like {"role": "user", ...}."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Any], /, *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """The text of a conversation as the model was trained to read it.

    Args:
      messages: tables like `Message`; they may come from a file, so they are checked.
      add_generation_prompt: end with the beginning of the assistant's next turn.
      variables: further ones that the template knows, like enable_thinking=False.

    Raises:
      InputError: the tokenizer has no template, a message is none, a variable has the name of the conversation, or
        the template is damaged or refuses the conversation.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            "this tokenizer has no chat template, so its model was not trained to chat. Give plain prompts, or a "
            "checkpoint whose tokenizer_config.json has one."
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InputError(f"message {index} must be a table with `role` and `content`, not {message!r}")
    if "messages" in variables:
        raise InputError("`messages` is the name of the conversation in a template; give the variable another name")
    special = {k: v for k, v in getattr(tokenizer, "special_tokens", {}).items() if v is not None}
    names = {"tools": None, "documents": None, **special, **variables}
    names |= {"messages": [dict(m) for m in messages], "add_generation_prompt": add_generation_prompt}
    try:
        return _compiled(tokenizer.chat_template).render(names)
    except InputError:
        raise
    except Exception as error:  # the template is a program: it may raise whatever Python raises
        raise InputError(f"the model's chat template refuses this conversation: {error}") from error


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Any], /, **variables: Any) -> np.ndarray:
    """int32 ids of `render_chat`'s text. Templates write bos themselves, so none is put before it."""
    return tokenizer.encode(render_chat(tokenizer, messages, **variables))


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks what an assistant said; here it only encloses it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json  # Jinja's own escapes for HTML
    environment.globals |= {"raise_exception": _refuse, "strftime_now": lambda f: datetime.datetime.now().strftime(f)}
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise InputError(f"the model's chat template is no valid Jinja: line {error.lineno}: {error}") from error
    except (SyntaxError, RecursionError) as error:  # too deeply nested for Python
        raise InputError(f"the model's chat template cannot be compiled: {error}") from error


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **form: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **form)
