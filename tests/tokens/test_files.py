"""A tokenizer's files: read, refused in words where they are damaged, written again as they were;
chat templates, kept as data and run in a sandbox."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenmakers import CHAT, byte_level, sentence_pieces, word_pieces

from regard.tokens import Tokenizer

TALK = [{"role": "user", "content": " Hi! "}, {"role": "assistant", "content": "Yes"}]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 2**33) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


def fill(folder: Path, **named: str) -> Path:
    """`tokenizer_config=...` becomes the file tokenizer_config.json; template, merges are text."""
    for stem, text in named.items():
        suffix = {"chat_template": "jinja", "merges": "txt"}.get(stem, "json")
        (folder / f"{stem}.{suffix}").write_text(text, encoding="utf-8")
    return folder


def test_load_reads_a_folder_and_a_lone_file_alike(tmp_path: Path) -> None:
    config = json.dumps({"bos_token": {"content": "<s>"}, "eos_token": None})
    names = json.dumps({"bos_token": "<unk>", "eos_token": "</s>"})
    fill(tmp_path, tokenizer=sentence_pieces(), tokenizer_config=config, special_tokens_map=names)
    folder, lone = Tokenizer.load(tmp_path), Tokenizer.load(str(tmp_path / "tokenizer.json"))
    assert (folder.special.bos, folder.special.eos) == (1, 2)  # the config is believed first
    assert lone.special.bos is None and lone.special.all == (0, 1, 2)
    assert folder.encode("a be").ids == lone.encode("a be").ids


def test_saving_writes_what_was_read_byte_by_byte(tmp_path: Path) -> None:
    odd = word_pieces(truncated=True).replace(": ", " :\r\n  ", 3)
    config = '{"model_max_length" : 512, "x":1e3}'
    source, target = tmp_path / "a", tmp_path / "b" / "c"
    source.mkdir()
    fill(source, tokenizer_config=config, special_tokens_map='{"pad_token":"[PAD]"}')
    fill(source, chat_template=CHAT)
    (source / "tokenizer.json").write_bytes(odd.encode())
    Tokenizer.load(source).save(target)
    assert sorted(p.name for p in target.iterdir()) == sorted(p.name for p in source.iterdir())
    for path in source.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes()
    again = Tokenizer.load(target)
    assert again.chat_template == CHAT and again.special.pad == 0
    again.save(target)  # over itself


def test_saving_parts_and_loading_gives_the_same_tokenizer(tmp_path: Path) -> None:
    made = Tokenizer.from_parts(sentence_pieces(), {"bos_token": "<s>", "chat_template": CHAT})
    made.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.special == made.special and again.chat_template == CHAT
    assert again.encode("abe 日月").ids == made.encode("abe 日月").ids


def test_saving_beside_a_stranger_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, chat_template="stale")
    with pytest.raises(ValueError, match=r"holds chat_template\.jinja of another tokenizer"):
        Tokenizer.from_parts(word_pieces()).save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["chat_template.jinja"]


def test_vocab_and_merges_become_a_byte_level_tokenizer(tmp_path: Path) -> None:
    told = json.loads(byte_level())["model"]
    vocab = {**told["vocab"], "<|endoftext|>": len(told["vocab"])}
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in told["merges"])
    fill(tmp_path, vocab=json.dumps(vocab), merges=merges)
    ours, judge = Tokenizer.load(tmp_path), Tokenizer.from_parts(byte_level())
    for text in ("The animal 日本  x\n", " it's", ""):
        assert ours.encode(text).ids == judge.encode(text).ids
        assert ours.encode(text).offsets == judge.encode(text).offsets
    assert ours.special.eos == len(told["vocab"])
    asked = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, "bos_token": "<pad>"}
    fill(tmp_path, tokenizer_config=json.dumps(asked))
    assert Tokenizer.load(tmp_path).encode("it").ids == [0, *judge.encode("it").ids]
    fill(tmp_path, merges="#version: 0.2\na b c\n")
    with pytest.raises(ValueError, match=r"merges.txt, line 2 holds 'a b c'"):
        Tokenizer.load(tmp_path)
    fill(tmp_path, merges=merges, vocab='{"a": "0"}')
    with pytest.raises(ValueError, match=r"vocab.json gives 'a' the id '0'"):
        Tokenizer.load(tmp_path)
    fill(tmp_path, vocab=json.dumps(vocab), tokenizer_config='{"tokenizer_class": "RobertaX"}')
    with pytest.raises(ValueError, match=r"RobertaX.*save_pretrained"):
        Tokenizer.load(tmp_path)


NEW = {"content": "<new>", **dict.fromkeys(("lstrip", "rstrip", "single_word"), False)}


@pytest.mark.parametrize(
    ("stem", "told"),
    [
        ("tokenizer_config", {"added_tokens_decoder": {"397": {**NEW, "special": True}}}),
        ("tokenizer_config", {"added_tokens_decoder": {"397": {**NEW, "special": False}}}),
        ("tokenizer_config", {"additional_special_tokens": ["<new>", "<pad>"]}),
        ("tokenizer_config", {"additional_special_tokens": ["animal", "<new>"]}),
        ("tokenizer_config", {"extra_special_tokens": {"image_token": "<new>"}}),
        ("special_tokens_map", {"additional_special_tokens": ["<new>"]}),
        ("added_tokens", {"<newer>": 398, "<new>": 397}),
    ],
)
def test_tokens_added_beside_the_vocabulary_are_tokens(
    stem: str, told: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import PreTrainedTokenizerFast

    fill(tmp_path, tokenizer=byte_level(), **{stem: json.dumps(told)})
    ours, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in ("The <new> animal<newer>", "<new><new>", "it<pad>"):
        ids = ours.encode(text).ids
        assert ids == theirs(text)["input_ids"]
        for skip in (True, False):
            assert ours.decode(ids, skip_special=skip) == theirs.decode(
                ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
            )
    assert ours.id("<new>") == theirs.convert_tokens_to_ids("<new>")
    ours.save(tmp_path / "again")
    assert Tokenizer.load(tmp_path / "again").special == ours.special


def test_vocab_and_merges_may_have_tokens_added_beside_them(tmp_path: Path) -> None:
    told = json.loads(byte_level())["model"]
    vocab = {**told["vocab"], "<|endoftext|>": len(told["vocab"])}
    merges = "".join(f"{a} {b}\n" for a, b in told["merges"])
    more = {"<|pad|>": len(vocab), "<|sep|>": len(vocab) + 1}
    fill(tmp_path, vocab=json.dumps(vocab), merges=merges, added_tokens=json.dumps(more))
    fill(tmp_path, special_tokens_map='{"pad_token": "<|pad|>"}')
    ours = Tokenizer.load(tmp_path)
    assert ours.special.pad == len(vocab) and ours.vocab_size == len(vocab) + 2
    assert ours.encode("<|sep|><|pad|>").ids == [len(vocab) + 1, len(vocab)]
    assert ours.decode([len(vocab) + 1, len(vocab)]) == "<|sep|>"


def test_names_of_special_tokens_may_be_text(tmp_path: Path) -> None:
    fill(tmp_path, tokenizer=byte_level(), tokenizer_config='{"split_special_tokens": true}')
    said = Tokenizer.load(tmp_path).encode("it<pad>")
    assert len(said.ids) > 3 and not any(said.special_mask)


@pytest.mark.parametrize(
    ("key", "cls", "counts"),
    [
        ("do_lower_case", "BertTokenizer", True),
        ("strip_accents", "BertTokenizer", True),
        ("tokenize_chinese_chars", "BertTokenizer", True),
        ("do_lower_case", "PreTrainedTokenizerFast", False),
        ("add_prefix_space", "GPT2Tokenizer", True),
        ("add_prefix_space", "PreTrainedTokenizerFast", False),
    ],
)
def test_what_the_config_says_of_a_step_counts_as_in_transformers(
    key: str, cls: str, counts: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    told = json.loads(byte_level() if key == "add_prefix_space" else word_pieces())
    if key != "add_prefix_space":
        told["normalizer"]["strip_accents"] = None  # as letters are lowered or not
        words = ["日本", "Caf\xe9", "cafe", "caf\xe9", "Cafe"]
        told["model"]["vocab"] |= {word: 90 + n for n, word in enumerate(words)}
    text, found = "Caf\xe9 caf\xe9 日本 the bird", []
    for value in (True, False):
        config = {"tokenizer_class": cls, key: value}
        fill(tmp_path, tokenizer=json.dumps(told), tokenizer_config=json.dumps(config))
        found.append(Tokenizer.load(tmp_path).encode(text, special=False).ids)
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        assert found[-1] == theirs(text, add_special_tokens=False).input_ids
    assert (found[0] != found[1]) == counts


def test_what_is_not_there_is_said_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        Tokenizer.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json in this folder.*transformers"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e")
    with pytest.raises(ValueError, match=r"only a SentencePiece model \(tokenizer\.model\).*save_"):
        Tokenizer.load(tmp_path)


def change(*path: Any, to: Any) -> str:
    told = json.loads(word_pieces())
    place = told
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = to
    return json.dumps(told)


@pytest.mark.parametrize(
    ("stem", "text", "words"),
    [
        ("tokenizer", "", r"tokenizer\.json is not JSON"),
        ("tokenizer", word_pieces()[:999], r"tokenizer\.json is not JSON"),
        ("tokenizer", "[" * 99_999, r"tokenizer\.json is nested too deep"),
        ("tokenizer", "[]", r"is a JSON list, \[\]; expected an object"),
        ("tokenizer", "{}", r"tokenizer\.json is damaged: "),
        (
            "tokenizer",
            change("model", "vocab", "bird", to=5),
            "'the' the same id 5|'bird' the same",
        ),
        ("tokenizer", change("added_tokens", 0, "id", to=3), r"adds '\[PAD\]' as id 3, but .* 0"),
        ("tokenizer", change("decoder", to=3), r"tokenizer\.json is damaged: "),
        ("tokenizer_config", "{", r"tokenizer_config\.json is not JSON"),
        ("tokenizer_config", '{"pad_token": 3}', "gives pad_token as 3"),
        ("tokenizer_config", '{"pad_token": {"content": ["a"]}}', "gives pad_token as"),
        ("tokenizer_config", '{"pad_token": "\\ud800"}', "has half a character"),
        ("tokenizer_config", '{"chat_template": 3}', "gives chat_template as 3"),
        ("tokenizer_config", '{"chat_template": [{"name": "x"}]}', "gives chat_template as"),
        ("tokenizer_config", '{"added_tokens_decoder": [3]}', r"adds the token \[3\] with id ''"),
        ("tokenizer_config", '{"added_tokens_decoder": {"9": 3}}', "adds the token 3 with id '9'"),
        ("tokenizer_config", '{"added_tokens_decoder": {"9": {}}}', r"adds the token \{\} with"),
        (
            "tokenizer_config",
            '{"added_tokens_decoder": {"99": {"content": "<new>"}}}',
            "the id of '<new>' is told as 99, but the vocabulary",
        ),
        ("tokenizer_config", '{"additional_special_tokens": 3}', "adds the token 3 with id None"),
        ("added_tokens", '{"<new>": "first"}', "adds the token '<new>' with id 'first'"),
        ("special_tokens_map", "7", r"special_tokens_map\.json is a JSON int"),
        ("special_tokens_map", '{"sep_token": "nope"}', "sep_token is 'nope'"),
    ],
)
def test_a_damaged_file_is_one_clear_error(
    stem: str, text: str, words: str, tmp_path: Path
) -> None:
    fill(tmp_path, **{"tokenizer": word_pieces(), stem: text})
    with pytest.raises(ValueError, match=words) as caught:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(caught.value) and "; " in str(caught.value)


def test_a_file_that_is_not_text_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(b'{"\xff\xfe')
    with pytest.raises(ValueError, match="not UTF-8 text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "merges.txt"])
def test_a_link_to_a_file_that_is_lost_is_told(name: str, tmp_path: Path) -> None:
    stems = (
        {"vocab": '{"<|endoftext|>": 0}'} if name == "merges.txt" else {"tokenizer": byte_level()}
    )
    fill(tmp_path, **stems)
    (tmp_path / name).unlink(missing_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "blobs" / "lost")
    with pytest.raises(ValueError, match=rf"{name}' \(a link to .*lost'\) is missing"):
        Tokenizer.load(tmp_path)


def test_a_file_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200_000_001)  # a hole: nothing is written
    with pytest.raises(ValueError, match="has more than 200000000 bytes"):
        Tokenizer.load(tmp_path)


def places(told: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value, so that any of them can be spoilt."""
    keys = [*told] if isinstance(told, dict) else range(len(told)) if isinstance(told, list) else []
    return [(told, key) for key in keys] + [p for key in keys for p in places(told[key])]


def check_only_value_errors(text: str, config: dict[str, Any] | None) -> None:
    try:
        made = Tokenizer.from_parts(text, config)
        said = made.encode("The bird sings 鳥 ☃!")
        made.decode(said.ids)
        made.spans(said.ids)
        stream = made.decode_stream()
        assert "".join(map(stream.step, said.ids)) + stream.finish() == made.decode(said.ids)
    except ValueError as error:
        assert len(str(error)) > 29


@pytest.mark.parametrize("source", [word_pieces, sentence_pieces])
@settings(max_examples=300)
@given(data=st.data())
def test_a_spoilt_tokenizer_json_raises_nothing_but_value_error(
    source: Any, data: st.DataObject
) -> None:
    told = json.loads(source())
    told.get("model", {}).pop("merges", None)  # else nearly every place is a byte of the vocabulary
    container, key = data.draw(st.sampled_from(places(told)))
    spoil = data.draw(st.sampled_from(["drop", "other", "swap"]))
    if spoil == "drop":
        del container[key]
    elif spoil == "other":
        container[key] = data.draw(JSON)
    else:
        from_where, other = data.draw(st.sampled_from(places(told)))
        container[key] = json.loads(json.dumps(from_where[other]))
    check_only_value_errors(json.dumps(told), None)


@given(data=st.data(), text=st.text())
def test_spoilt_letters_and_configs_raise_nothing_but_value_error(
    data: st.DataObject, text: str
) -> None:
    whole = word_pieces()
    at = data.draw(st.integers(0, len(whole)))
    length = data.draw(st.integers(0, 29))
    check_only_value_errors(whole[:at] + text + whole[at + length :], None)
    keys = st.sampled_from(["bos_token", "pad_token", "chat_template", "tokenizer_class"])
    check_only_value_errors(whole, data.draw(st.dictionaries(keys, JSON)))


def chatty(template: Any, **config: Any) -> Tokenizer:
    return Tokenizer.from_parts(
        sentence_pieces(), {"bos_token": "<s>", "chat_template": template, **config}
    )


def test_a_chat_is_written_as_the_template_says() -> None:
    ours = chatty(CHAT)
    assert ours.apply_chat(TALK) == "<s>[user] Hi!\n[assistant] Yes\n[assistant]"
    assert ours.apply_chat(TALK, False) == "<s>[user] Hi!\n[assistant] Yes\n"


def test_a_chat_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    text = CHAT + (
        "{%- for tool in tools or [] %}{% if loop.first %}{% continue %}{% endif %}\n"
        "  {{ tool | tojson }} {{ tool | tojson(indent=2) }}{% break %}{% endfor %}\n"
        "    {%- set ns = namespace(n=0) %}\n"
        "    {% if true %}\n   x\n    {% endif %}\n"
        "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}{{ ns.n }} {{ eos_token }}{{ unk_token is defined }}"
    )
    ours = chatty(text, eos_token="</s>")
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tools: list[dict[str, Any]] = [{"a": 1}, {"b": "<é & 日>"}]
    for asked in (True, False):
        told = theirs.apply_chat_template(
            TALK, tools=tools, tokenize=False, add_generation_prompt=asked
        )
        assert ours.apply_chat(TALK, asked, tools=tools) == told


def test_a_template_that_asks_for_tools_is_told_that_there_are_none(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    ours = chatty(
        "{% if tools is not none %}tools{% endif %}{% if documents is not none %}texts{% endif %}"
        "{{ tools is defined }} {{ documents is defined }}"
    )
    ours.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert ours.apply_chat(TALK) == theirs.apply_chat_template(TALK, tokenize=False)
    assert ours.apply_chat(TALK, tools=[]) == "toolsTrue True"


def test_templates_are_found_wherever_they_are_kept(tmp_path: Path) -> None:
    fill(tmp_path, tokenizer=word_pieces(), tokenizer_config='{"chat_template": "old"}')
    assert Tokenizer.load(tmp_path).apply_chat(TALK) == "old"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "newer"}')
    assert Tokenizer.load(tmp_path).apply_chat(TALK) == "newer"
    fill(tmp_path, chat_template="newest")
    assert Tokenizer.load(tmp_path).apply_chat(TALK) == "newest"
    pair = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b{{ x }}"}]
    assert chatty(pair).chat_template == "a"
    assert chatty(pair).apply_chat(TALK, template="tool_use", x=3) == "b3"
    with pytest.raises(ValueError, match=r"no chat template 'default' \(there: none\)"):
        Tokenizer.from_parts(word_pieces()).apply_chat(TALK)


def test_a_template_knows_the_day() -> None:
    year = datetime.datetime.now().year
    assert int(chatty("{{ strftime_now('%Y') }}").apply_chat(TALK)) in (year, year + 1)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ messages | attr('__class__') }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].clear() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% set spend = 1 %}{% set a = range(997) | list %}{% for x in a %}{% for y in a %}"
        "{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(29) }}",
        "{{ range(10000000000) | sum }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * [1] }}",
        "{{ 9 ** 9 ** 9 }}",
    ],
)
def test_a_hostile_template_is_stopped_in_words(template: str) -> None:
    before = json.dumps(TALK)
    with pytest.raises(
        ValueError, match=r"stopped in its sandbox: it .*; do not use this template"
    ):
        chatty(template).apply_chat(TALK)
    assert json.dumps(TALK) == before


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('no system role') }}", "refused these messages: no system role"),
        ("{{ nothing.there }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("\n{% if %}", "not a Jinja template: line 2"),
        ("{% for x in messages %}", "not a Jinja template: line 1"),
        ("(" * 9 + "{{" + "(" * 9999, "chat template"),
        ("{% include 'x' %}", "refused these messages"),
    ],
)
def test_a_template_that_fails_says_why(template: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chatty(template).apply_chat(TALK)


@pytest.mark.parametrize("wrong", ["hi", {"role": "user"}, [3], [{"content": "x"}], None])
def test_messages_that_are_none_are_refused(wrong: Any) -> None:
    with pytest.raises(TypeError, match='"role"'):
        chatty(CHAT).apply_chat(wrong)
