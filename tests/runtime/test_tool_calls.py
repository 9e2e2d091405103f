"""Tool calls found in text however it is cut, nothing lost or told twice; and the grammars that force them."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.call_parser import CallDelta
from runtime.tool_calls import FORMATS, ToolCallParser, detect, grammar

Calls = list[tuple[str, str]]


class Reader:
    """Joins what a parser gives out; a name is told once, before any of its arguments."""

    def __init__(self, form: str) -> None:
        self.parser: ToolCallParser = FORMATS[form].parser()
        self.content = ""
        self.calls: Calls = []

    def take(self, content: str, news: list[CallDelta]) -> None:
        self.content += content
        for delta in news:
            assert (delta.name is not None) == (delta.index == len(self.calls)), delta
            if delta.name is not None:
                self.calls.append((delta.name, ""))
            assert delta.index == len(self.calls) - 1
            self.calls[-1] = (self.calls[-1][0], self.calls[-1][1] + delta.arguments)


def read(form: str, pieces: list[str], final: bool = True) -> tuple[str, Calls]:
    reader = Reader(form)
    for piece in pieces:
        reader.take(*reader.parser.feed(piece))
    if final:
        reader.take(*reader.parser.finish())
    return reader.content, reader.calls


def hermes(*objects: str) -> str:
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


F1, G0 = ("f", '{"x": 1}'), ("g", "{}")
CALLED = '{"name": "f", "arguments": {"x": 1}}'
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "a " + hermes(CALLED), "a ", [F1]),
    ("hermes", hermes('{"name": "f", "arguments": {"x": "}{\\""}}'), "", [("f", '{"x": "}{\\""}')]),
    ("hermes", hermes('{"id": [{}, 1], "arguments": {"x": 1}, "name": "f"}'), "", [F1]),
    ("hermes", f'<tool_call>{CALLED}\n<tool_call>{{"name": "g"}}</tool_call>', "", [F1, G0]),
    ("hermes", hermes('{"name": "g", "arguments": null}', '{"name": "g", "arguments": ""}'), "", [G0, G0]),
    ("hermes", f"a {hermes(CALLED)}\nb {hermes(CALLED)} c", "a \nb  c", [F1, F1]),
    ("hermes", f"{hermes(CALLED)} \n<tool_c", " \n<tool_c", [F1]),
    ("hermes", f"<tool_call>{CALLED}</tool_<tool_call>{CALLED}", "</tool_", [F1, F1]),
    ("hermes", f"<tool_call><tool_call>{CALLED}</tool_call>", "<tool_call>", [F1]),
    ("hermes", hermes('{"name": "f", "arguments": {"x": 1}, "parameters": {}}'), "", [F1]),
    ("hermes", "plain { text }", "plain { text }", []),
    # arguments as a string that holds JSON
    ("hermes", hermes('{"name": "f", "arguments": "{\\"x\\": 1}"}') + " done", " done", [F1]),
    ("hermes", hermes('{"arguments": "{\\"x\\": 1}", "name": "f"}'), "", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"\\ud83d\\ude00\\u00e9\\"', "", [("f", '{"😀é"')]),
    ("hermes", hermes('{"name": "f", "arguments": "{\\"x\\": \\"\\ud800\\"}"}'), "", [("f", '{"x": "\\ud800"}')]),
    # cut
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "a\\', "", [("f", '{"x": "a\\')]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f"', "", [("f", "")]),
    ("hermes", '<tool_call>{"name": "f", "argu', "", [("f", "")]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f", "i', "", [F1]),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', "", [F1]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}', "", [F1, G0]),
    (
        "llama3",
        '{"type": "function", "name": "f", "parameters": {"x": 1}}\n{"name": "g", "parameters": {}}\n',
        "",
        [F1, G0],
    ),
    ("llama3", '{"name": "g", "parameters": {}} bye', " bye", [G0]),
    ("llama3", '<|python_tag|>{"name": "g"}', "", [G0]),
    ("mistral", f'so [TOOL_CALLS] [{CALLED}, {{"name": "g", "id": "1", "arguments": {{}}}}]', "so ", [F1, G0]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "", [F1, G0]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS] {"x": 1} ok', " ok", [F1]),
    ("mistral", f"[TOOL_CALLS][{CALLED}] x", " x", [F1]),
    ("mistral", f"[TOOL_CALLS][{CALLED} , nope]", " , nope]", [F1]),
]
NO_CALLS = [
    ("hermes", hermes('{"nome": "f"}') + " <tool_c"),
    ("hermes", '<tool_call>{"na'),
    ("hermes", '<tool_call>{"arguments": {"x": 1}'),
    ("hermes", hermes('{"name": "f", oops}')),
    ("hermes", hermes('{"name": f, "arguments": {}}')),
    ("hermes", hermes('{"name": "", "arguments": {}}')),
    ("hermes", hermes('{"name": 5, "arguments": {}}')),
    ("hermes", hermes('{"name": "\\ud800", "arguments": {}}')),
    ("hermes", hermes('{"name": "f", "arguments": 5}')),
    ("hermes", hermes('{"name": "f", "arguments": [1]}')),
    ("hermes", hermes('{"name": "f", "arguments": "words"}')),
    ("hermes", hermes('{"name": "f", "id": oops, "arguments": {}}')),
    ("hermes", hermes('{"arguments": {"x" oops}, "name": "f"}')),
    ("hermes", hermes('{"arguments": ' + '{"x":' * 5000 + "1" + "}" * 5000 + ', "name": "f"}')),
    ("llama3", 'I think {"name": "f", "parameters": {}}'),
    ("llama3", '{"answer": 42} and {'),
    ("llama3", '{"name": "John", "age": 3}'),
    ("llama3", ' <|python_tag|>print("hello")'),
    ("llama3", " \n<|pyth"),
    ("mistral", "[TOOL_CALLS] nothing"),
    ("mistral", "[TOOL_CALLS]I think that {x} is set"),
    ("mistral", "[TOOL_CALLS]f[ARGS]nope {"),
    ("mistral", '[TOOL_CALLS] \n[{"nome": 1}] x'),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found(form: str, text: str, content: str, calls: Calls) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


@pytest.mark.parametrize(("form", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_letter(form: str, text: str) -> None:
    assert read(form, [text]) == read(form, list(text)) == (text, [])


def test_what_breaks_after_its_name_was_told_goes_on_as_content() -> None:
    assert read("hermes", ['<tool_call>{"name": "f", "arguments": {"x": 1]} b']) == ("]} b", [("f", '{"x": 1')])


def test_names_and_arguments_come_as_they_are_known() -> None:
    parser = FORMATS["hermes"].parser()
    assert parser.feed('a <tool_call>{"name": "f", "arguments": ') == ("a ", [])
    assert parser.feed('{"x": ') == ("", [CallDelta(0, "f", '{"x": ')])
    assert parser.feed("1") == ("", [CallDelta(0, None, "1")])
    assert parser.feed("}}</tool_call>") == ("", [CallDelta(0, None, "}")])


def test_a_mark_is_held_back_only_while_it_may_be_one() -> None:
    parser = FORMATS["hermes"].parser()
    assert [parser.feed(piece)[0] for piece in ("a <tool", "_", "x", "<")] == ["a ", "", "<tool_x", ""]
    assert parser.finish() == ("<", [])


MARKS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "f[ARGS]",
    "<|python_tag|>",
    '{"name": "f"',
    '"arguments": ',
    '{"name": "f", "arguments": {"a": 1}}',
    '{"arguments": {}, "name": ',
    '"{\\"x\\": \\ud83d',
    "null",
    "\\u00e9",
]
PARTS = st.lists(st.sampled_from([*MARKS, *'{}[]",:\\ \n;ab<']), max_size=12)
TEXT = PARTS.map("".join) | st.text(max_size=30)
FORM = st.sampled_from(sorted(FORMATS))


def is_within(part: str, whole: str) -> bool:
    """Whether `part` is `whole` with some characters left out."""
    rest = iter(whole)
    return all(char in rest for char in part)


@settings(max_examples=250, deadline=None, derandomize=True)
@given(FORM, TEXT, st.lists(st.integers(0, 200), max_size=4))
def test_what_is_found_does_not_depend_on_the_pieces(form: str, text: str, at: list[int]) -> None:
    cuts = sorted(min(cut, len(text)) for cut in at)
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    content, calls = read(form, [text])
    assert (content, calls) == read(form, list(text)) == read(form, pieces)
    assert is_within(content, text) and (calls or content == text)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FORM, TEXT)
def test_what_is_out_after_some_characters_depends_on_those_alone(form: str, text: str) -> None:
    reader = Reader(form)
    for k, char in enumerate(text, 1):
        reader.take(*reader.parser.feed(char))
        assert (reader.content, reader.calls) == read(form, [text[:k]], final=False)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALL = st.tuples(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), OBJECTS)
WORDS = st.text('ab {}"\n', max_size=6).map(lambda text: f"x{text}x")


@settings(max_examples=150, deadline=None, derandomize=True)
@given(FORM, st.lists(CALL, min_size=1, max_size=3), st.booleans(), st.booleans(), st.booleans())
def test_calls_of_any_arguments_come_back(form: str, calls: Any, ascii: bool, late: bool, quoted: bool) -> None:
    texts = [json.dumps(arguments, ensure_ascii=ascii) for _, arguments in calls]
    objects = []
    for (name, _), text in zip(calls, texts, strict=True):
        members = [f'"name": "{name}"', f'"{FORMATS[form].arguments}": {json.dumps(text) if quoted else text}']
        objects.append("{" + ", ".join(members[::-1] if late else members) + "}")
    names = [name for name, _ in calls]
    assert read(form, list(written(form, objects))) == ("", list(zip(names, texts, strict=True)))


def written(form: str, objects: list[str]) -> str:
    chosen = FORMATS[form]
    if chosen.listed:
        return chosen.opens + chosen.between.join(objects) + chosen.closes
    return chosen.between.join(chosen.opens + one + chosen.closes for one in objects)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from(["hermes", "mistral"]), st.lists(st.tuples(WORDS, CALL), max_size=3), WORDS, st.booleans())
def test_words_around_calls_are_content(form: str, turns: Any, last: str, named: bool) -> None:
    text, expected = "", []
    for words, (name, arguments) in turns:
        told = json.dumps(arguments)
        one = json.dumps({"name": name, "arguments": arguments})
        text += words + (f"[TOOL_CALLS]{name}[ARGS]{told}" if named and form == "mistral" else written(form, [one]))
        expected.append((name, told))
    assert read(form, list(text + last)) == ("".join(words for words, _ in turns) + last, expected)


@pytest.mark.parametrize(
    ("form", "before", "filling"),
    [
        ("hermes", hermes(CALLED), " "),
        ("hermes", '<tool_call>{"arguments": {}', ', "a": 1'),
        ("llama3", CALLED, " "),
        ("mistral", "[TOOL_CALLS]", "a"),
    ],
)
def test_what_is_held_back_is_not_read_again_and_again(form: str, before: str, filling: str) -> None:
    """A bound far above what linear code takes (0.1 s), below what lstrip at each piece can take (10 s)."""
    began = time.process_time()
    read(form, [before, *filling * (80_000 // len(filling))])
    assert time.process_time() - began < 3


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [{"name": "weather", "parameters": CITY}, {"name": "now"}, {"name": 'o"d\\\x7fd é', "parameters": {}}]


def accepts(lark: str, text: str) -> bool:
    """Whether the text is a whole output of the grammar, by bytes."""
    llguidance = pytest.importorskip("llguidance")
    matcher = llguidance.LLMatcher(
        llguidance.LLTokenizer("byte"), llguidance.LLMatcher.grammar_from_lark(lark), log_level=0
    )
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return bool(matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting())


def call(form: str, name: str, arguments: Any) -> str:
    return json.dumps({"name": name, FORMATS[form].arguments: arguments}, ensure_ascii=False)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_the_grammar_takes_what_the_parser_reads_and_nothing_else(form: str) -> None:
    pytest.importorskip("llguidance")
    one, several = grammar(form, FUNCTIONS, False), grammar(form, FUNCTIONS, True)
    good, other = call(form, "weather", {"city": "Rome"}), call(form, "now", {"any": [1]})
    for objects in ([good], [other], [call(form, 'o"d\\\x7fd é', {})]):
        assert accepts(one, written(form, objects)) and accepts(several, written(form, objects))
        assert len(read(form, list(written(form, objects)))[1]) == 1
    assert accepts(several, written(form, [good, other, good]))
    assert not accepts(one, written(form, [good, good])) and not accepts(several, "")
    assert not accepts(one, "words " + written(form, [good]))
    for wrong in (("wether", {"city": "Rome"}), ("weather", {}), ("weather", {"city": 3}), ("now", 5), ("now", [])):
        assert not accepts(one, written(form, [call(form, *wrong)])), wrong


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": CITY["properties"], "required": ["city"]},
        {"$ref": "#/$defs/place", "$defs": {"place": CITY}},
        {"anyOf": [CITY, {"properties": {"at": {"type": "integer"}}, "required": ["at"]}]},
    ],
)
def test_arguments_are_an_object_whatever_the_schema_leaves_open(schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    lark = grammar("llama3", [{"name": "f", "parameters": schema}], False)
    assert accepts(lark, call("llama3", "f", {"city": "Rome"}))
    assert not accepts(lark, call("llama3", "f", 5)) and not accepts(lark, call("llama3", "f", {}))


def test_forced_arguments_have_little_white_space() -> None:
    pytest.importorskip("llguidance")
    lark, text = grammar("llama3", FUNCTIONS, False), call("llama3", "weather", {"city": "Rome"})
    assert accepts(lark, text.replace('"Rome"}', '"Rome"\n}'))
    assert not accepts(lark, text.replace('{"city"', '{  "city"')) and not accepts(lark, " " + text)


def test_a_grammar_needs_a_known_format_and_a_function() -> None:
    with pytest.raises(ValueError, match="functions"):
        grammar("hermes", [], True)
    with pytest.raises(KeyError):
        grammar("other", FUNCTIONS, True)


def test_formats_are_known_by_their_templates() -> None:
    assert detect("…<tool_call>…") == "hermes" and detect("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect("<|python_tag|>") == detect('{"name": f, "parameters": {}}') == "llama3"
    assert detect("nothing") is None
