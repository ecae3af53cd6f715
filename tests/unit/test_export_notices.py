"""What a user is told of the files besides errors: DoRA that readers leave out, a LoRA that does nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_models import SD15, perturb, sd15_model

from lora_trainer.adapters import inject
from lora_trainer.config.loading import Loaded, load
from lora_trainer.config.schema import ModelConfig
from lora_trainer.modality import RunFacts
from lora_trainer.outputs import ImageOutputs
from lora_trainer.run_folder import RunFolder

BASE = "modelo: {modelo_base: owner/name}\ndados: {diretorio_dados: .}\nsaida: {diretorio: saida}\n"


def loaded(folder: Path, *overrides: str) -> Loaded:
    path = folder / "meu.yaml"
    path.write_text(BASE, encoding="utf-8")
    return load(path, overrides)


@pytest.mark.parametrize("formats", ["kohya", "[kohya]"])
def test_dora_in_kohya_files_alone_is_told(tmp_path, formats):
    (notice,) = loaded(tmp_path, "modelo.dora=sim", f"saida.formatos={formats}").notices
    assert "o diffusers ignora o DoRA" in notice
    assert "acrescente diffusers a `saida.formatos`" in notice
    assert "modelo.dora=sim" in notice or "linha de comando" in notice


def test_the_same_in_english(tmp_path):
    (notice,) = loaded(tmp_path, "model.dora=yes", "system.language=en").notices
    assert "diffusers ignores DoRA" in notice
    assert "add diffusers to `output.formats`" in notice


@pytest.mark.parametrize(
    "settings", [(), ("modelo.dora=nao",), ("modelo.dora=sim", "saida.formatos=[kohya, diffusers]")]
)
def test_no_notice_where_all_is_read(tmp_path, settings):
    assert loaded(tmp_path, *settings).notices == []


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("intermediate", [False, True])
def test_a_lora_that_does_nothing_is_a_warning(tmp_path, caplog, trained, intermediate):
    adapter = inject(sd15_model(), SD15, ModelConfig(lora_rank=2, lora_targets="mid_block.*to_q"), 0)
    if trained:
        perturb(adapter)
    batches = SimpleNamespace(dataset=SimpleNamespace(training=[], regularization=[]), steps_per_epoch=1)
    facts = RunFacts(loaded(tmp_path), RunFolder(tmp_path / "saida", "x"), "2026-11-29", 7, print)
    (path,) = ImageOutputs(facts, SD15, batches).save(adapter, 7, intermediate=intermediate)
    assert path.is_file()
    told = [record.message for record in caplog.records if "LoRA ainda é nulo" in record.message]
    assert len(told) == (0 if trained else 1)
    assert trained or "passo 7" in told[0]


def test_an_adapter_of_dora_without_b_is_null_too():
    adapter = inject(sd15_model(), SD15, ModelConfig(lora_rank=2, dora=True), 0)
    assert adapter.is_untrained()
    with torch.no_grad():
        perturb(adapter)
    assert not adapter.is_untrained()
