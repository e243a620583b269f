"""The tokenizer's files in a checkpoint's folder: tokenizer.json, and what stands beside it about special tokens."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from nosa_jax.errors import InputError
from nosa_jax.json_files import read_json
from nosa_jax.tokenizer import BYTES, ByteTokenizer, JsonTokenizer, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
SETTINGS_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")
GENERATION_FILE = "generation_config.json"
_KIND_KEY = "nosa_jax_tokenizer"  # in tokenizer_config.json: which class of this package wrote the files


def read_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a folder, with its special tokens, ends of text and chat template; None if it has none.

    Special tokens are those of tokenizer_config.json, then of special_tokens_map.json, then those with a usual name.
    Texts end with eos, and with every `eos_token_id` of config.json and generation_config.json.

    Raises:
      InputError: a file is damaged, or names a token that is not in the vocabulary.
    """
    settings = _optional_json(folder / SETTINGS_FILE)
    if settings.get(_KIND_KEY) == BYTES:
        return ByteTokenizer()
    file = folder / TOKENIZER_FILE
    if not file.is_file():
        if (folder / "tokenizer.model").is_file():
            raise InputError(
                f"{str(folder)!r} has a tokenizer.model but no {TOKENIZER_FILE}. Write one with "
                "`transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)`, or name another with "
                "--tokenizer."
            )
        return None
    special = _optional_json(folder / SPECIAL_FILE) | {k: v for k, v in settings.items() if v is not None}
    names = {role: _token_text(special.get(f"{role}_token"), role, folder) for role in ("bos", "eos", "pad")}
    stop_ids = [
        i
        for name in ("config.json", GENERATION_FILE)
        for i in _ids(_optional_json(folder / name).get("eos_token_id"), folder / name)
    ]
    tokenizer = JsonTokenizer.from_file(
        file, **names, stop_ids=stop_ids, chat_template=_chat_template(folder, settings), begins=True
    )
    return tokenizer if _begins(settings, tokenizer) else _without_beginning(tokenizer)


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Write files from which `read_tokenizer` makes the same tokenizer, and other libraries one that agrees with it."""
    special = getattr(tokenizer, "special_tokens", None)
    if isinstance(tokenizer, ByteTokenizer):
        spec, kind = _bytes_spec(tokenizer), BYTES
        special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    elif isinstance(tokenizer, JsonTokenizer):
        spec, kind = tokenizer.spec, TOKENIZER_FILE
    else:
        raise InputError(f"a {type(tokenizer).__name__} cannot be written as {TOKENIZER_FILE}; give a JsonTokenizer.")
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        _KIND_KEY: kind,
        **{name: text for name, text in (special or {}).items() if text is not None},
        "add_bos_token": tokenizer.bos_id is not None,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    (folder / TOKENIZER_FILE).write_text(spec, encoding="utf-8")
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    generation = {"bos_token_id": tokenizer.bos_id, "eos_token_id": list(tokenizer.stop_ids) or None,
                  "pad_token_id": tokenizer.pad_id}  # fmt: skip
    (folder / GENERATION_FILE).write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")


def _bytes_spec(tokenizer: ByteTokenizer) -> str:
    """A tokenizer.json that gives the same ids: one token per byte, in the byte alphabet of that format."""
    # The format spells bytes as printable characters: printable Latin-1 as itself, the others from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    vocab = {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    model.add_special_tokens(["<bos>", "<eos>", "<pad>"])
    assert [model.token_to_id(t) for t in ("<bos>", "<eos>", "<pad>")] == [256, 257, tokenizer.pad_id]
    return model.to_str()


def _optional_json(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _token_text(value: Any, role: str, folder: Path) -> str | None:
    """A token is a text, or a table with its text as `content`."""
    text = value.get("content") if isinstance(value, Mapping) else value
    if text is not None and not isinstance(text, str):
        raise InputError(f"{role}_token={value!r} in {str(folder)!r} must be a text or a table with `content`.")
    return text


def _ids(value: Any, path: Path) -> list[int]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
        raise InputError(f"eos_token_id={value!r} in {str(path)!r} must be a token id or a list of them.")
    return ids


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """A file of its own, or the setting: a text, or a list of named ones of which "default" is taken."""
    jinja, table = (folder / name for name in TEMPLATE_FILES)
    if jinja.is_file():
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{str(jinja)!r} cannot be read: {error}. Copy the checkpoint again.") from error
    found = _optional_json(table).get("chat_template", settings.get("chat_template"))
    if isinstance(found, list):
        named = {t.get("name"): t.get("template") for t in found if isinstance(t, Mapping)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise InputError(f"chat_template in {str(folder)!r} must be a text, not {type(found).__name__}.")
    return found


def _begins(settings: Mapping[str, Any], tokenizer: JsonTokenizer) -> bool:
    """Whether documents begin with bos: as set, else as the file's own post-processor does it."""
    if isinstance(settings.get("add_bos_token"), bool):
        return settings["add_bos_token"]
    processed = tokenizers.Tokenizer.from_str(tokenizer.spec)
    if processed.post_processor is None:
        return not settings  # a bare tokenizer.json says nothing; released checkpoints say what they want
    return tokenizer.bos_id in processed.encode("").ids[:1]


def _without_beginning(tokenizer: JsonTokenizer) -> JsonTokenizer:
    values = tokenizer.to_dict()
    return JsonTokenizer(
        tokenizer.spec,
        **{role: values[role] for role in ("bos", "eos", "pad")},
        begins=False,
        stop_ids=tokenizer.stop_ids,
        chat_template=tokenizer.chat_template,
    )
