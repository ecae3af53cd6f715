"""Every kind of refusal the schema can produce has its own sentence, in both languages."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from lora_trainer.config import messages, names
from lora_trainer.config.schema import Config
from lora_trainer.errors import set_language

WRONG = ["texto", "", None, -1, 0, 1e9, 2.5, "0,5", True, [], [1], [1, 2, 3, 4], {"a": 1}, "a\tb", "a\udce9", float("nan"), b"x"]


def refusals() -> list[tuple[names.Option, dict[str, Any]]]:
    found: list[tuple[names.Option, dict[str, Any]]] = []
    for (section, name), option in names.options().items():
        for value in WRONG:
            try:
                Config.model_validate({section: {name: value}})
            except ValidationError as error:
                found += [(option, dict(detail)) for detail in error.errors()]
    return found


def test_every_code_has_a_sentence() -> None:
    seen = set()
    for option, detail in refusals():
        seen.add(detail["type"])
        texts = {}
        for lang in ("pt", "en"):
            set_language(lang)
            message, hint = messages.explain(
                str(detail["type"]), detail["input"], option, option.shown("pt"), detail.get("ctx", {})
            )
            assert f"`{option.pt}`" in message
            texts[lang] = message + hint
        assert texts["pt"] != texts["en"]
        assert "Input should" not in texts["pt"] + texts["en"]
    assert {
        "greater_than", "greater_than_equal", "less_than", "less_than_equal", "multiple_of", "literal_error",
        "int_parsing", "float_parsing", "boolean", "number", "decimal_comma", "resolution", "resolution_small",
        "resolution_large",
        "control_character", "surrogate", "too_short", "too_long", "list_type", "dict_type", "string_type", "string_too_short",
        "string_pattern_mismatch", "finite_number", "share", "tokens",
    } <= seen  # fmt: skip


@pytest.mark.parametrize(
    ("key", "written", "value", "code", "expected"),
    [
        (("training", "epochs"), "treino.epocas", "0", "greater_than_equal", "entre 1 e 1000000, veio `0`"),
        (
            ("model", "lora_rank"),
            "m.lora_rank",
            "0",
            "less_than_equal",
            "`lora_rank`: esperava um valor entre 1 e 1024",
        ),
        (("data", "bucket_step"), "d.passo_bucket", "65", "multiple_of", "entre 8 e 512 e múltiplo de 8"),
        (("training", "learning_rate"), "t.lr", "0", "greater_than", "um valor maior que 0 e de no máximo 10"),
        (("data", "crop"), "dados.corte", "x", "literal_error", "centro, aleatorio"),
        (("data", "crop"), "data.crop", "x", "literal_error", "center, random"),
        (("data", "flip"), "dados.espelhar", "x", "boolean", "um destes: sim, não"),
        (("data", "flip"), "data.flip", "x", "boolean", "um destes: yes, no"),
    ],
)
def test_allowed_values_in_the_language_of_the_key(
    key: names.Key, written: str, value: str, code: str, expected: str
) -> None:
    message, _ = messages.explain(code, value, names.options()[key], written, {})
    assert expected in message


def test_no_torch_on_this_path() -> None:
    """The modules of config/ must stay importable without torch; test_cli measures the whole command."""
    folder = Path(messages.__file__).parent
    for module in folder.glob("*.py"):
        assert "import torch" not in module.read_text(encoding="utf-8"), module.name
