"""The declarations, the names derived from them, and the published JSON Schema."""

import itertools
import re

import pytest

from lora_trainer.config import json_schema, names
from lora_trainer.config.schema import Config


def test_schema_json_is_up_to_date() -> None:
    assert json_schema.DEFAULT_PATH.read_text(encoding="utf-8") == json_schema.text(), (
        "run python -m lora_trainer.config.json_schema"
    )


def test_schema_json_accepts_both_languages() -> None:
    schema = json_schema.build()
    assert schema["properties"]["treino"] == schema["properties"]["training"]
    training = schema["definitions"]["training"]["properties"]
    assert training["epocas"] == training["epochs"] == {"$ref": "#/definitions/training.epochs"}
    data = schema["definitions"]["data"]["properties"]
    assert data["tamanho_lote"] == data["batch_size"] == {"$ref": "#/definitions/training.batch_size"}
    scheduler = schema["definitions"]["training.lr_scheduler"]["anyOf"][0]["enum"]
    assert {"cosseno", "cosine", "constante"} <= set(scheduler)
    assert {"herda", "extends"} <= set(schema["properties"])
    references = re.findall(r'"#/definitions/([^"]+)"', json_schema.text())
    assert set(references) == set(schema["definitions"])


def test_every_option_is_declared_whole() -> None:
    for option in names.options().values():
        assert option.pt
        assert option.doc_pt
        assert option.doc_en
        assert option.kind in (*names.KINDS, "choice", "any")
        assert option.pt.isascii()
        assert option.pt == option.pt.lower()


@pytest.mark.parametrize("section", list(names.sections()))
def test_no_spelling_means_two_options(section: str) -> None:
    own = [o for o in names.options().values() if o.section == section]
    guests = [o for o in names.options().values() if o.also_in == section]
    for one, other in itertools.combinations(own + guests, 2):
        assert not {one.name, one.pt} & {other.name, other.pt}


def test_words_mean_real_choices() -> None:
    for option in names.options().values():
        if option.choices:
            assert set(option.words.values()) <= set(option.choices)


def test_foreign_names_mean_one_option_and_are_no_own_names() -> None:
    assert len(names.foreign()) == sum(len(option.elsewhere) for option in names.options().values()) > 90
    own = {(o.section, spelling) for o in names.options().values() for spelling in (o.name, o.pt)}
    for foreign, option in names.foreign().items():
        assert (option.section, foreign) not in own


def test_defaults_are_valid() -> None:
    assert Config().training.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("typed", "section", "expected"),
    [
        ("clasificacao_lora", "model", "`classificacao_lora`"),
        ("lora_rnk", "model", "`lora_rank`"),
        ("Época", "training", "`epocas`"),
        ("train_batch_size", "training", "`treino.tamanho_lote`"),
        ("resolucao", "training", "`dados.resolucao`"),
        ("resolution", "training", "`data.resolution`"),
        ("trieno", None, "`treino`"),
        ("zzz", "system", "semente, dispositivo, idioma, linhas_execucao"),
        ("zzz", None, "modelo, dados, treino"),
    ],
)
def test_suggestions(typed: str, section: str | None, expected: str) -> None:
    assert expected in names.suggest(typed, section)
