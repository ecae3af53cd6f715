"""What a user is told of the files besides errors: DoRA that readers leave out, a LoRA that does nothing."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_models import SD15, perturb, sd15_model

from lora_trainer.adapters import check_targets, inject
from lora_trainer.config.loading import Loaded, load
from lora_trainer.config.schema import ModelConfig
from lora_trainer.data.outputs import ImageOutputs
from lora_trainer.errors import set_language
from lora_trainer.journal.run_folder import RunFolder
from lora_trainer.modality import RunFacts

BASE = "modelo: {modelo_base: owner/name}\ndados: {diretorio_dados: .}\nsaida: {diretorio: saida}\n"


def loaded(folder: Path, *overrides: str) -> Loaded:
    path = folder / "meu.yaml"
    path.write_text(BASE, encoding="utf-8")
    return load(path, overrides)


class Skeleton:
    """SD 1.5 of tiny size, before anything is loaded."""

    def __getattr__(self, name):
        return getattr(SD15, name)

    def load_model(self, device, dtype, *, with_text=False):
        return sd15_model()


def test_dora_in_kohya_files_alone_is_told():
    (notice,) = check_targets(Skeleton(), ModelConfig(dora=True), ["kohya"])
    assert "o diffusers ignora o DoRA" in notice
    assert "acrescente diffusers a `saida.formatos`" in notice


def test_the_same_in_english():
    set_language("en")
    (notice,) = check_targets(Skeleton(), ModelConfig(dora=True), ["kohya"])
    assert "diffusers ignores DoRA" in notice
    assert "add diffusers to `output.formats`" in notice


@pytest.mark.parametrize(("dora", "formats"), [(False, ["kohya"]), (True, ["kohya", "diffusers"]), (True, ["diffusers"])])
def test_no_notice_where_all_is_read(dora, formats):
    assert check_targets(Skeleton(), ModelConfig(dora=dora), formats) == []


@pytest.mark.parametrize("formats", ["auto", "peft", "diffusers", "kohya"])
def test_the_config_alone_does_not_know_the_files(tmp_path, formats):
    """The usual format of transformers is diffusers, of language models peft."""
    assert loaded(tmp_path, "modelo.dora=sim", f"saida.formatos={formats}").notices == []


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
