"""Rows to conversations: schemas recognised row by row, roles by their aliases, unusable rows dropped with their line
(case C04)."""

from pathlib import Path
from typing import Any

import pytest
from text_cases import chat, dataset, tokenizer, write_jsonl

from lora_trainer.config.schema import DataConfig
from lora_trainer.errors import DataError
from lora_trainer.text.read import read_rows
from lora_trainer.text.report import row_lines
from lora_trainer.text.schemas import Collected, Conversation, Text, collect

C04 = [
    {"conversations": [{"from": "human", "value": "oi"}, {"from": "gpt", "value": "olá"}]},
    {"messages": [{"role": "user", "content": "oi"}, {"role": "assistant", "content": "olá"}]},
    {"conversations": [{"from": "hummany", "value": "x"}, {"from": "gpt", "value": "y"}]},
    {
        "conversations": [
            {"from": "human", "value": "a"},
            {"from": "human", "value": "b"},
            {"from": "gpt", "value": "c"},
        ]
    },
    {"conversations": [{"from": "gpt", "value": "começo eu"}, {"from": "human", "value": "ok"}]},
    {"instruction": "some", "input": "", "output": "1+1=2"},
]


def collected(tmp_path: Path, rows: list[Any], **options: Any) -> Collected:
    return collect(read_rows(write_jsonl(tmp_path / "d.jsonl", rows)), DataConfig(**options))


def turns(tmp_path: Path, row: dict[str, Any]) -> list[tuple[str, str]]:
    (example,) = collected(tmp_path, [row]).examples
    assert isinstance(example, Conversation)
    return [tuple(turn) for turn in example.turns]


def reason(tmp_path: Path, row: dict[str, Any]) -> str:
    found = collected(tmp_path, [chat("oi", "olá"), row])
    ((why, places),) = found.notes.excluded.items()
    assert places == ["d.jsonl:2"]
    return why


def test_mixed_schemas_of_case_c04(tmp_path: Path) -> None:
    data = dataset(write_jsonl(tmp_path / "d.jsonl", C04), tokenizer(), chat_template="chatml")
    assert [e.where for e in data.examples] == ["d.jsonl:1", "d.jsonl:2", "d.jsonl:4", "d.jsonl:6"]
    assert data.collected.schemas == {"sharegpt": 2, "messages": 1, "alpaca": 1}
    assert data.examples[0].input_ids.tolist() == data.examples[1].input_ids.tolist()
    assert data.examples[0].uid != data.examples[1].uid
    fourth = collected(tmp_path, C04).examples[2]
    assert isinstance(fourth, Conversation)
    assert [tuple(turn) for turn in fourth.turns] == [("user", "a\n\nb"), ("assistant", "c")]
    lines = "\n".join(row_lines(data))
    assert "ok 4 / descartados 2" in lines
    assert "papel desconhecido `hummany`; quis dizer `human`?): 1: d.jsonl:3" in lines
    assert "termina sem resposta do assistente): 1: d.jsonl:5" in lines
    assert any("juntados: 1 (d.jsonl:4)" in note for note in data.notes.notes)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (chat("oi", "olá", system="seja breve"), [("system", "seja breve"), ("user", "oi"), ("assistant", "olá")]),
        (chat("oi", "olá", system="") | {"system": "s"}, [("system", "s"), ("user", "oi"), ("assistant", "olá")]),
        (chat("oi", "olá", system=" "), [("user", "oi"), ("assistant", "olá")]),
        ({"Instruction ": "Traduza", "INPUT": "casa", "Output": "house"}, [("user", "Traduza\n\ncasa"), ("assistant", "house")]),
        ({"instrucao": "Some", "entrada": None, "saida": 2}, [("user", "Some"), ("assistant", "2")]),
        (
            {"instruction": "e 3?", "output": "6", "history": [["2?", "4"]], "system": "dobro"},
            [("system", "dobro"), ("user", "2?"), ("assistant", "4"), ("user", "e 3?"), ("assistant", "6")],
        ),
        ({"question": "2+2", "answer": "4", "source": "x"}, [("user", "2+2"), ("assistant", "4")]),
        ({"pergunta": "2+2", "resposta": "4"}, [("user", "2+2"), ("assistant", "4")]),
        (
            {"prompt": [{"role": "user", "content": "oi"}], "completion": [{"role": "assistant", "content": "olá"}]},
            [("user", "oi"), ("assistant", "olá")],
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "oi"}]}, {"role": "model", "content": "olá"}]},
            [("user", "oi"), ("assistant", "olá")],
        ),
        (
            {"conversations": [{"from": f, "value": v} for f, v in (("Human", "t"), ("observation", "3"), ("bot", "é 3"))]},
            [("user", "t"), ("tool", "3"), ("assistant", "é 3")],
        ),
    ],
)  # fmt: skip
def test_known_columns_and_roles(row: dict[str, Any], expected: list[tuple[str, str]], tmp_path: Path) -> None:
    assert turns(tmp_path, row) == expected


def test_text_columns(tmp_path: Path) -> None:
    found = collected(tmp_path, [{"text": "um"}, {"Texto": "dois", "url": "x"}])
    assert [e.text for e in found.examples if isinstance(e, Text)] == ["um", "dois"]
    assert found.schemas == {"text": 2}


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (chat("oi", "  "), "turno vazio (assistant"),
        (chat("", "olá"), "turno vazio (user"),
        ({"messages": []}, "sem turnos"),
        ({"messages": [{"content": "oi"}, {"role": "assistant", "content": "x"}]}, "sem papel"),
        ({"messages": ["oi", "olá"]}, "não é um objeto"),
        ({"messages": [{"role": "assistant", "content": "só eu"}]}, "resposta sem pergunta"),
        (chat("oi", "olá", "e?"), "termina sem resposta"),
        ({"instruction": "a", "output": None}, "turno vazio (assistant"),
        ({"instruction": "a", "output": {"x": 1}}, "não é um texto"),
        ({"prompt": "a", "completion": True}, "não é um texto"),
        ({"text": float("nan")}, "não é um texto"),
        ({"messages": [*chat("oi", "olá")["messages"], {"role": "assistant", "tool_calls": [{}]}]}, "tool_calls"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "além de texto"),
    ],
)
def test_unusable_rows_are_dropped_with_their_reason(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    assert why in reason(tmp_path, row)


@pytest.mark.parametrize("row", [{"colour": "blue"}, {"role": "user", "content": "oi"}, {"instruction": "só"}, {}])
def test_unknown_columns_stop_with_what_was_expected(row: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        collected(tmp_path, [chat("oi", "olá"), row])
    told = str(error.value)
    assert told.startswith("d.jsonl:2: colunas desconhecidas")
    assert "instruction + output" in told


@pytest.mark.parametrize("answer", ["[1, 2, 3]", '[{"name": "soma", "arguments": {"a": 1}}]', "[música]", "[" * 5000])
def test_an_answer_that_looks_like_json_is_text(answer: str, tmp_path: Path) -> None:
    """Code and tool calls are answered so."""
    assert turns(tmp_path, {"prompt": "liste", "completion": answer}) == [("user", "liste"), ("assistant", answer)]


def test_messages_in_a_cell_of_prompt_and_completion(tmp_path: Path) -> None:
    row = {"prompt": '[{"role": "user", "content": "oi"}]', "completion": '[{"role": "assistant", "content": "olá"}]'}
    assert turns(tmp_path, row) == [("user", "oi"), ("assistant", "olá")]


def test_a_chosen_format_is_held_to(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="formato_texto") as error:
        collected(tmp_path, C04, text_format="sharegpt")
    assert [line.split(":")[1] for line in str(error.value).split("\n")[:2]] == ["2", "6"]


def test_nothing_usable_is_refused_with_the_reasons(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nenhum exemplo") as error:
        collected(tmp_path, [C04[2], C04[4]])
    assert "hummany" in str(error.value)
    assert "d.jsonl:2" in str(error.value)


def test_english(tmp_path: Path) -> None:
    from lora_trainer.errors import set_language

    set_language("en")
    with pytest.raises(DataError, match="no example can be used") as error:
        collected(tmp_path, [C04[2]])
    assert "unknown role `hummany`; did you mean `human`?" in str(error.value)
