"""Tool calls found in text however it is cut, nothing lost; and the grammars that force them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from runtime.tool_calls import FORMATS, CallDelta, detect, grammar

Found = tuple[str, list[tuple[str, str]]]


def read(form: str, pieces: list[str]) -> Found:
    """(content, [(name, arguments)]); a name is told once, before any of its arguments."""
    parser = FORMATS[form].parser()
    content, calls = "", []
    for text, news in [*map(parser.feed, pieces), parser.finish()]:
        content += text
        for delta in news:
            assert (delta.name is not None) == (delta.index == len(calls)), delta
            if delta.name is not None:
                calls.append((delta.name, ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
            assert delta.index == len(calls) - 1
    return content, calls


F1, G0 = ("f", '{"x": 1}'), ("g", "{}")
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", 'a <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>', "a ", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": "}{\\""}}</tool_call>', "", [("f", '{"x": "}{\\""}')]),
    ("hermes", '<tool_call>{"arguments": {"x": 1}, "name": "f"}</tool_call>', "", [F1]),
    (
        "hermes",
        '<tool_call>{"name": "f", "arguments": {"x": 1}}\n<tool_call>{"name": "g"}</tool_call>',
        "",
        [F1, G0],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call> done', " done", [F1]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"nome": "f"}</tool_call> <tool_c', '<tool_call>{"nome": "f"}</tool_call> <tool_c', []),
    ("hermes", '<tool_call>{"na', '<tool_call>{"na', []),
    ("hermes", "plain { text }", "plain { text }", []),
    ("llama3", '{"name": "f", "parameters": {"x": 1}}', "", [F1]),
    ("llama3", ' <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "arguments": {}}', "", [F1, G0]),
    ("llama3", 'I think {"name": "f", "parameters": {}}', 'I think {"name": "f", "parameters": {}}', []),
    ("llama3", '{"answer": 42} and {', '{"answer": 42} and {', []),
    ("llama3", '{"name": "g", "parameters": {}} bye', " bye", [G0]),
    (
        "mistral",
        'so [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]',
        "so ",
        [F1, G0],
    ),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{}', "", [F1, G0]),
    ("mistral", "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", []),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CASES)
def test_calls_are_found_however_the_text_is_cut(form: str, text: str, content: str, calls: Any) -> None:
    assert read(form, [text]) == (content, calls)
    assert read(form, list(text)) == (content, calls)


def test_names_and_arguments_come_as_they_are_known() -> None:
    parser = FORMATS["hermes"].parser()
    assert parser.feed('<tool_call>{"name": "f"') == ("", [CallDelta(0, "f", "")])
    assert parser.feed(', "arguments": {"x": ') == ("", [CallDelta(0, None, '{"x": ')])
    assert parser.feed("1}}</tool_call>") == ("", [CallDelta(0, None, "1}")])


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f"', '"arguments": {']
marks = st.sampled_from([*MARKS, *'{}[]",:\\ \n;ab<'])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FORMATS)), st.lists(marks, max_size=14), st.randoms(use_true_random=False))
def test_what_is_found_does_not_depend_on_the_pieces(form: str, parts: list[str], draw: Any) -> None:
    text = "".join(parts)
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(4))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, [text]) == read(form, list(text)) == read(form, pieces)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FORMATS)), st.text(alphabet="ab <{tol_[TC\n", max_size=40))
def test_text_without_calls_is_content_to_the_letter(form: str, text: str) -> None:
    assert read(form, list(text)) == (text, [])


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES, OBJECTS = st.from_regex(r"[a-z_]{1,8}", fullmatch=True), st.dictionaries(st.text(max_size=5), VALUES, max_size=3)
CALLS = st.lists(st.tuples(NAMES, OBJECTS), min_size=1, max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.sampled_from(sorted(FORMATS)), CALLS, st.booleans())
def test_calls_of_any_arguments_come_back(form: str, calls: list[tuple[str, Any]], ascii_only: bool) -> None:
    chosen = FORMATS[form]
    objects = [json.dumps({"name": n, chosen.arguments: a}, ensure_ascii=ascii_only) for n, a in calls]
    if form == "mistral":
        text = chosen.opens + chosen.between.join(objects) + chosen.closes
    else:
        text = chosen.between.join(chosen.opens + one + chosen.closes for one in objects)
    content, found = read(form, list(text))
    assert content == "" and [(name, json.loads(arguments)) for name, arguments in found] == calls


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTIONS = [{"name": "weather", "parameters": CITY}, {"name": "now"}]


def accepts(lark: str, text: str) -> bool:
    """Whether the text is a whole output of the grammar, by bytes."""
    words = LLTokenizer("byte")
    matcher = LLMatcher(words, LLMatcher.grammar_from_lark(lark), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_the_grammar_takes_what_the_parser_reads(form: str) -> None:
    chosen = FORMATS[form]

    def written(*calls: tuple[str, Any]) -> str:
        objects = [json.dumps({"name": name, chosen.arguments: arguments}) for name, arguments in calls]
        if form == "mistral":
            return chosen.opens + chosen.between.join(objects) + chosen.closes
        return chosen.between.join(chosen.opens + one + chosen.closes for one in objects)

    one, two = grammar(form, FUNCTIONS, False), grammar(form, FUNCTIONS, True)
    good = ("weather", {"city": "Rome"})
    assert accepts(one, written(good)) and accepts(two, written(good)) and accepts(two, written(good, ("now", {})))
    assert not accepts(one, written(good, good))
    for wrong in (("wether", {"city": "Rome"}), ("weather", {}), ("weather", {"city": 3})):
        assert not accepts(one, written(wrong))
    assert read(form, list(written(good)))[1] == [("weather", '{"city": "Rome"}')]


def test_formats_are_known_by_their_templates() -> None:
    assert detect("…<tool_call>…") == "hermes" and detect("{{ '[TOOL_CALLS]' }}") == "mistral"
    assert detect("<|python_tag|>") == "llama3" and detect("nothing") is None
