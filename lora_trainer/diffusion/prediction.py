"""Whether a base predicts noise (epsilon) or velocity (v), as far as it tells; never a guess.

A diffusers folder says so in its scheduler. Of single files, SDXL ones carry the marker keys `v_pred` and `ztsnr`, and
some have metadata. SD 2.x exists in both forms with identical tensors, so a silent file is refused until the user says.
"""

from collections.abc import Mapping
from typing import Any, Literal, cast

from ..errors import SourceError, t
from ..files.sources import Source

Prediction = Literal["epsilon", "v_prediction"]


def prediction_type(source: Source, asked: str, scheduler: Mapping[str, Any], release: str) -> tuple[Prediction, str]:
    """The prediction type, and a notice ("" if none) where the user's word goes against the file's."""
    told = _told(source, scheduler)
    if asked != "auto":
        if told not in (None, asked):
            return cast(Prediction, asked), t(
                pt=f"o modelo base diz que prevê {told}; uso {asked}, de modelo.tipo_predicao",
                en=f"the base says that it predicts {told}; using {asked}, from model.prediction_type",
            )
        return cast(Prediction, asked), ""
    if told in ("epsilon", "v_prediction"):
        return cast(Prediction, told), ""
    if told is not None:
        raise SourceError.said(
            pt=f"o modelo base prevê {told}, que não sei treinar",
            en=f"the base predicts {told}, which cannot be trained",
            hint_pt="use um modelo base de predição epsilon ou v",
            hint_en="use a base that predicts epsilon or v",
            where=source.what,
        )
    if release == "sd2":
        raise SourceError.said(
            pt=f"{source.path.name}: um arquivo SD 2.x não diz se prevê epsilon ou v, e errar estragaria o treino",
            en=f"{source.path.name}: an SD 2.x file does not tell whether it predicts epsilon or v, and a wrong "
            f"guess "
            "would spoil the training",
            hint_pt="escreva modelo.tipo_predicao: v (modelos de 768 px, como o 2.1) ou epsilon (modelos base de 512 "
            "px)",
            hint_en="set model.prediction_type: v (768 px models such as 2.1) or epsilon (512 px base models)",
            where=source.what,
        )
    return "epsilon", ""


def noise_schedule(source: Source, scheduler: Mapping[str, Any]) -> dict[str, Any]:
    """The scheduler's config; rescaled to end in pure noise where a single file's marker key `ztsnr` says so."""
    return dict(scheduler) | ({"rescale_betas_zero_snr": True} if "ztsnr" in source.header else {})


def _told(source: Source, scheduler: Mapping[str, Any]) -> str | None:
    if source.kind == "folder" and source.config("scheduler") is not None:
        return str(scheduler.get("prediction_type", "epsilon"))  # the default of diffusers' own schedulers
    if "prediction_type" in scheduler:  # modelo.arquitetura brought a scheduler
        return str(scheduler["prediction_type"])
    if "v_pred" in source.header:
        return "v_prediction"
    spec = source.metadata.get("modelspec.prediction_type", "").lower()
    if spec in ("v", "v_prediction", "v-prediction"):
        return "v_prediction"
    if spec in ("eps", "epsilon"):
        return "epsilon"
    flag = source.metadata.get("ss_v_parameterization", "").lower()
    return {"true": "v_prediction", "false": "epsilon"}.get(flag)
