"""Tokenizer files of released checkpoints, and their chat templates."""

import json
from pathlib import Path

import pytest
import tokenizers

from nosa_jax.chat import encode_chat, render_chat
from nosa_jax.errors import InputError
from nosa_jax.tokenizer import ByteTokenizer, JsonTokenizer, load_tokenizer
from nosa_jax.tokenizer_files import read_tokenizer

WORDS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "user", "assistant", "system", "hello", "world", "\n"]
# Of the form that chat models of this family use: turns between marks, and an empty thought where thinking is off.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n' }}{% endif %}{% endif %}"
)
HELLO = [{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]


def spec(bos_template: bool = False) -> str:
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    if bos_template:
        model.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return model.to_str()


def folder_with(path: Path, bos_template: bool = False, **files: object) -> Path:
    """tokenizer.json, and JSON files by their names without ending."""
    (path / "tokenizer.json").write_text(spec(bos_template))
    for name, values in files.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path


def test_special_tokens_of_a_released_folder(tmp_path) -> None:
    """Texts or tables, ends of text from config and generation_config, the template from tokenizer_config."""
    folder = folder_with(
        tmp_path,
        tokenizer_config={
            "add_bos_token": True, "bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>",
            "pad_token": None, "chat_template": CHATML, "tokenizer_class": "LlamaTokenizer",
        },
        special_tokens_map={"pad_token": {"content": "<unk>"}, "eos_token": "<|im_end|>"},
        config={"eos_token_id": 2},
        generation_config={"eos_token_id": [2, 4]},
    )  # fmt: skip
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.stop_ids) == (1, 2, 0, (2, 4))
    assert tokenizer.encode("hello world", bos=True).tolist() == [1, 8, 9]
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize(
    ("settings", "bos_template", "begins"),
    [
        ({"add_bos_token": False}, True, False),
        ({"add_bos_token": True}, False, True),
        ({}, True, True),
        ({}, False, True),  # a bare tokenizer.json: documents begin with bos, as in training
        ({"eos_token": "</s>"}, False, False),
        ({"eos_token": "</s>"}, True, True),
    ],
)
def test_whether_documents_begin_with_bos(tmp_path, settings, bos_template, begins) -> None:
    files = {"tokenizer_config": settings} if settings else {}
    tokenizer = read_tokenizer(folder_with(tmp_path, bos_template, **files))
    assert tokenizer.encode("hello", bos=True).tolist() == ([1, 8] if begins else [8])
    assert tokenizer.special_tokens["bos_token"] == "<s>"  # templates know it in any case


@pytest.mark.parametrize("form", ["setting", "named", "jinja", "json"])
def test_every_place_of_a_chat_template(tmp_path, form) -> None:
    folder = folder_with(tmp_path)
    if form == "jinja":
        (folder / "chat_template.jinja").write_text(CHATML)
    elif form == "json":
        (folder / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))
    else:
        named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]
        (folder / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": CHATML if form == "setting" else named})
        )
    assert read_tokenizer(folder).chat_template == CHATML


def chat_tokenizer(template: str = CHATML) -> JsonTokenizer:
    return JsonTokenizer(spec(), chat_template=template)


def test_rendering_and_ids() -> None:
    tokenizer = chat_tokenizer()
    expected = "<|im_start|>system\nworld<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"
    assert render_chat(tokenizer, HELLO, add_generation_prompt=False) == expected
    assert render_chat(tokenizer, HELLO) == expected + "<|im_start|>assistant\n"
    assert render_chat(tokenizer, HELLO, enable_thinking=False).endswith("assistant\n<think>\n\n</think>\n")
    assert encode_chat(tokenizer, HELLO).tolist() == [3, 7, 9, 4, 3, 5, 8, 4, 3, 6]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[-1].content }}{{ eos_token }}", "<s>hello</s>"),
        ("{{ messages | tojson }}", '[{"role": "system", "content": "world"}, {"role": "user", "content": "hello"}]'),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% endfor %}", "hello"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}", "world"),
        ("{% for m in messages %}\n    {{ m.role }};\n{% endfor %}", "    system;\n    user;\n"),
        ("{{ strftime_now('%Y')[:2] }}", "20"),
        ("{{ tools is none }}", "True"),
        ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
    ],
)
def test_what_templates_may_use(template, text) -> None:
    assert render_chat(chat_tokenizer(template), HELLO) == text


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[5].content.upper() }}", "no element 5|has no element"),
        ("{% for m in messages %}", "no valid Jinja"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "cannot be compiled"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses.*recursion"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "refuses"),  # the sandbox
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ ''.__class__.mro() }}", "refuses"),
    ],
)
def test_template_that_refuses_or_reaches_out(template, words) -> None:
    with pytest.raises(InputError, match=words):
        render_chat(chat_tokenizer(template), HELLO)


def test_variables_of_any_name() -> None:
    """None of them is taken for an argument of the functions that pass it on."""
    tokenizer = chat_tokenizer("{{ tokenizer }}{{ self }}{{ template }}{{ bos_token }}")
    names = {"tokenizer": 1, "self": 2, "template": 3, "bos_token": 4}
    assert render_chat(tokenizer, HELLO, **names).startswith("1")
    assert encode_chat(tokenizer, HELLO, **names).size
    with pytest.raises(InputError, match="`messages` is the name of the conversation"):
        encode_chat(tokenizer, HELLO, messages=1)


def test_half_a_character() -> None:
    """JSON and arguments can hold it; bytes take it."""
    for half in ("\ud800", "\udcff"):
        with pytest.raises(InputError, match="at character 6 is half of a character"):
            JsonTokenizer(spec()).encode(f"hello {half}")
        assert ByteTokenizer().encode(f"hello {half}").size == 9


@pytest.mark.parametrize("messages", [[{"role": "user"}], ["hello"], [{"content": "x"}], [{"role": 1, "content": "x"}]])
def test_what_is_no_message(messages) -> None:
    with pytest.raises(InputError, match="message 0 must be a table with `role` and `content`"):
        render_chat(chat_tokenizer(), messages)


def test_model_that_does_not_chat() -> None:
    for tokenizer in (ByteTokenizer(), JsonTokenizer(spec())):
        with pytest.raises(InputError, match="no chat template"):
            render_chat(tokenizer, HELLO)


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("tokenizer.json", "{}", "tokenizer.json"),
        ("tokenizer_config.json", "{", "tokenizer_config.json"),
        ("tokenizer_config.json", "[]", "must hold a table"),
        ("tokenizer_config.json", '{"eos_token": "<nope>"}', "no token '<nope>'"),
        ("tokenizer_config.json", '{"eos_token": 3}', "eos_token=3"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template"),
        ("generation_config.json", '{"eos_token_id": "</s>"}', "eos_token_id='</s>'"),
    ],
)
def test_damaged_files_are_named(tmp_path, file, text, words) -> None:
    folder = folder_with(tmp_path)
    (folder / file).write_text(text)
    with pytest.raises(InputError, match=words):
        read_tokenizer(folder)


def test_template_file_that_is_no_text(tmp_path) -> None:
    folder = folder_with(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja' cannot be read"):
        read_tokenizer(folder)


def test_folder_without_a_tokenizer(tmp_path) -> None:
    assert read_tokenizer(tmp_path) is None
    with pytest.raises(InputError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(InputError, match=r"tokenizer\.model but no tokenizer\.json"):
        read_tokenizer(tmp_path)
