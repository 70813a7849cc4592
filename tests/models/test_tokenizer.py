import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from logra_jax.models.tokenizer import ChatTokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "1234 + 5678 = 6912, 3.14 and -2",
    "tabs\tand\r\nnew\n\n\nlines",
    "def f(x):\n    return {'a': x ** 2}  # comment",
    "Ünïcödé — “quotes” … naïve façade",
    "数学の問題 3＋5 は？ Привет, мир",
    "emoji 👩‍🚀🎉 and \u200bzero width",
    "combining e\u0301 versus é",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><repo_name><|im_end|><|im_end|>",
    "<|im_start> broken <im_end|>",
    "don't can't we'll I'm they've",
    "x" * 300,
]

USER = {"role": "user", "content": "What is 3 + 5?"}
SYSTEM = {"role": "system", "content": "Answer with a number."}
ASSISTANT = {"role": "assistant", "content": "8 <b> & 'c'"}
CONVERSATIONS = [
    [USER],
    [SYSTEM, USER],
    [USER, ASSISTANT, USER],
    [{"role": "user", "content": "  spaces and\nlines \n"}],
]

# What chat templates in the wild lean on, one trait each.
TEMPLATES = {
    "blocks trimmed": (
        "{% for m in messages %}\n    {% if m.role %}\n{{ m.content }}\n"
        "    {% endif %}\n{% endfor %}\nend\n"
    ),
    "special tokens": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    "json": "{{ messages | tojson }} {{ messages[0] | tojson(indent=2) }}",
    "generation": (
        "{% for m in messages %}\n{% generation %}\n{{ m.content }}\n"
        "{% endgeneration %}\n{% endfor %}"
    ),
    "loop controls": "{% for m in messages %}{{ m.role }}{% break %}{% endfor %}",
    "date": "{{ strftime_now('%Y-%m') }}",
    "no tools": "{{ 'tools' if tools is not none else 'none' }}",
    "namespace": (
        "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}"
        "{% endfor %}{{ n.k }}"
    ),
    "absent key": "{{ 'name' in messages[0] }}{{ messages[0].get('name', '-') }}",
}


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> ChatTokenizer:
    return ChatTokenizer.load(smollm2_dir)


@pytest.fixture(scope="module")
def oracle(smollm2_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


def write_small(directory: Path, tokenizer_config: dict | None = None, **files) -> Path:
    """A six-word tokenizer in Hugging Face form; `files` are further JSON files."""
    words = ["<s>", "</s>", "<pad>", "<end>", "a", "b"]
    small = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<s>")
    )
    small.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    small.decoder = decoders.Fuse()
    small.add_special_tokens(words[:4])
    small.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{{ messages[0].content }}",
    } | (tokenizer_config or {})
    config = {key: value for key, value in config.items() if value is not None}
    for name, value in ({"tokenizer_config": config} | files).items():
        (directory / f"{name}.json").write_text(json.dumps(value), "utf-8")
    return directory


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_text_equal_those_of_transformers(tokenizer, oracle, text):
    ids = tokenizer.encode(text)
    assert ids == oracle(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


def test_decode_takes_numpy_ids(tokenizer):
    import numpy as np

    assert tokenizer.decode(np.asarray(tokenizer.encode("3 + 5"), np.int32)) == "3 + 5"


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("open_turn", [True, False])
def test_packaged_template_renders_as_in_transformers(
    tokenizer, oracle, messages, open_turn
):
    expected = oracle.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=open_turn
    )
    assert tokenizer.render(messages, add_generation_prompt=open_turn) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_chat_ids_equal_those_of_transformers(tokenizer, oracle, messages):
    expected = oracle.apply_chat_template(messages, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == expected["input_ids"]


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_any_template_renders_as_in_transformers(tmp_path, template):
    from transformers import AutoTokenizer

    directory = write_small(tmp_path, {"chat_template": template})
    messages = [USER | {"name": None}, ASSISTANT]
    expected = AutoTokenizer.from_pretrained(directory).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    assert ChatTokenizer.load(directory).render(messages) == expected


def test_template_reads_further_variables(tmp_path):
    directory = write_small(tmp_path, {"chat_template": "{{ enable_thinking }}"})
    assert ChatTokenizer.load(directory).render([], enable_thinking=False) == "False"


def test_template_file_wins_over_the_config(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("from the file", "utf-8")
    assert ChatTokenizer.load(write_small(tmp_path)).render([USER]) == "from the file"


def test_default_is_taken_from_named_templates(tmp_path):
    named = [
        {"name": "tool_use", "template": "tools"},
        {"name": "default", "template": "plain"},
    ]
    directory = write_small(tmp_path, {"chat_template": named})
    assert ChatTokenizer.load(directory).render([USER]) == "plain"


def test_packaged_model_ends_and_pads_with_im_end(tokenizer):
    assert (tokenizer.eos_ids, tokenizer.pad_id) == ((2,), 2)
    assert tokenizer.vocab_size == 49152


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({}, (1,)),
        ({"config": {"eos_token_id": 3}}, (3, 1)),
        ({"config": {"text_config": {"eos_token_id": [2, 3]}}}, (2, 3, 1)),
        (
            {
                "config": {"eos_token_id": 1},
                "generation_config": {"eos_token_id": [3, 1, 3]},
            },
            (3, 1),
        ),
        (
            {
                "config": {"eos_token_id": 0, "text_config": {"eos_token_id": 2}},
                "generation_config": {"eos_token_id": 3},
            },
            (3, 0, 2, 1),
        ),
        ({"tokenizer_config": None, "config": {"eos_token_id": 3}}, (3, 1)),
        ({"config": {"eos_token_id": None}, "generation_config": {}}, (1,)),
        ({"config": {"eos_token_id": []}}, (1,)),
    ],
)
def test_whatever_any_file_names_ends_an_answer(tmp_path, files, eos_ids):
    assert ChatTokenizer.load(write_small(tmp_path, **files)).eos_ids == eos_ids


@pytest.mark.parametrize(
    ("tokenizer_config", "files", "pad_id"),
    [
        ({"pad_token": {"content": "<pad>", "special": True}}, {}, 2),
        ({"pad_token": "<pad>"}, {"config": {"pad_token_id": 0}}, 2),
        ({}, {"config": {"pad_token_id": 0}}, 0),
        ({}, {}, 1),
    ],
)
def test_pad_comes_from_tokenizer_then_config_then_eos(
    tmp_path, tokenizer_config, files, pad_id
):
    directory = write_small(tmp_path, tokenizer_config, **files)
    assert ChatTokenizer.load(directory).pad_id == pad_id


def test_an_answer_ends_without_an_eos_token_where_a_file_has_an_id(tmp_path):
    directory = write_small(
        tmp_path, {"eos_token": None}, generation_config={"eos_token_id": 3}
    )
    assert ChatTokenizer.load(directory).eos_ids == (3,)


def test_prompts_are_neither_cut_nor_padded(tmp_path):
    directory = write_small(tmp_path)
    small = Tokenizer.from_file(str(directory / "tokenizer.json"))
    small.enable_truncation(2)
    small.enable_padding(length=8)
    small.save(str(directory / "tokenizer.json"))
    assert ChatTokenizer.load(directory).encode("a b a b a") == [4, 5, 4, 5, 4]


def test_tokens_only_in_the_config_get_their_ids(tmp_path):
    entries = {"6": {"content": "<think>", "special": True}}
    loaded = ChatTokenizer.load(
        write_small(tmp_path, {"added_tokens_decoder": entries})
    )
    assert loaded.encode("a <think>") == [4, 6]
    assert loaded.decode([4, 6]) == "a"
    assert loaded.vocab_size == 7


def test_saved_files_are_the_same_bytes(smollm2_dir, tokenizer, tmp_path):
    tokenizer.save(tmp_path / "new" / "folder")
    saved = {
        path.name: path.read_bytes() for path in (tmp_path / "new/folder").iterdir()
    }
    assert set(saved) == {
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    }
    for name, content in saved.items():
        assert content == (smollm2_dir / name).read_bytes()
    again = ChatTokenizer.load(tmp_path / "new" / "folder")
    assert again.encode_chat([USER]) == tokenizer.encode_chat([USER])
    assert again.eos_ids == tokenizer.eos_ids


def test_saving_onto_itself_changes_nothing(tmp_path):
    directory = write_small(tmp_path)
    before = (directory / "tokenizer.json").read_bytes()
    ChatTokenizer.load(directory).save(directory)
    assert (directory / "tokenizer.json").read_bytes() == before


def test_transformers_is_not_imported(tmp_path):
    program = (
        "import sys\n"
        "from logra_jax.models.tokenizer import ChatTokenizer\n"
        "assert not {'tokenizers', 'jinja2'} & set(sys.modules)\n"
        f"print(ChatTokenizer.load({str(write_small(tmp_path))!r}).encode('b a'))\n"
        "assert not {'transformers', 'torch', 'jax'} & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[5, 4]"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_missing_file_is_named(tmp_path, name):
    (write_small(tmp_path) / name).unlink()
    with pytest.raises(ValueError, match=f"`{name}` is missing from"):
        ChatTokenizer.load(tmp_path)


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"is missing from .*nowhere"):
        ChatTokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "nonsense"),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, content):
    (write_small(tmp_path) / name).write_text(content, "utf-8")
    with pytest.raises(ValueError, match=name):
        ChatTokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer_config", "message"),
    [
        ({"chat_template": None}, "`chat_template` is missing"),
        (
            {"chat_template": "{% if %}"},
            "`chat_template` of .* must be a Jinja template",
        ),
        ({"eos_token": None}, "`eos_token` is missing"),
        ({"eos_token": "<other>"}, "`eos_token` .* '<other>'.*does not hold"),
        (
            {"added_tokens_decoder": {"9": {"content": "<think>"}}},
            "`added_tokens_decoder` .* id 9, but tokenizer.json leaves it 6",
        ),
    ],
)
def test_unusable_config_is_one_sentence(tmp_path, tokenizer_config, message):
    with pytest.raises(ValueError, match=message):
        ChatTokenizer.load(write_small(tmp_path, tokenizer_config))


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'a' + messages[0].absent }}", "absent"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_conversation_the_template_refuses_is_one_sentence(tmp_path, template, message):
    loaded = ChatTokenizer.load(write_small(tmp_path, {"chat_template": template}))
    with pytest.raises(ValueError, match=f"`messages` must be .*{message}"):
        loaded.render([USER])
