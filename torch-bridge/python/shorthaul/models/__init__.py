"""The networks that the bench and the demo train, by name.

``EXAMPLES`` has each with a full-size configuration, a small one for tests, and the number of
parameters. Owns this list; the networks are in the files beside it, or torchvision's.
"""

from __future__ import annotations

import torch

from . import vision
from .digits import DigitsConvNet, DigitsTransformer
from .example import (
    Example,
    clicks,
    crps,
    images,
    padded_tokens,
    tokens,
    without_dropout,
)
from .grids import (
    EnsembleConfig,
    EnsembleUNet,
    Mixer,
    MixerConfig,
    UNet2d,
    YoloBlock,
    ensembles,
)
from .recommendation import Dlrm, DlrmConfig, visits
from .sequences import (
    Bert,
    BertConfig,
    Gpt,
    GptConfig,
    Llama,
    LlamaConfig,
    LstmClassifier,
    WaveNet,
    WaveNetConfig,
    bert_large_layer,
    bert_layer,
)


def _rows(length: int, width: int):
    return lambda batch: (torch.randn(batch, length, width),)


_SMALL_BERT = BertConfig(50, 16, 32, 4, 2, 64)
_SMALL_GPT = GptConfig(50, 16, 32, 4, 2)
_SMALL_LLAMA = LlamaConfig(50, 48, 4, 2, 2, 64)
_SMALL_WAVENET = WaveNetConfig(16, 8, 16, 1, 3)
_SMALL_DLRM = DlrmConfig(4, 3, 20, 2, 8, (16,), (16,))
_SMALL_MIXER = MixerConfig(16, 4, 32, 2, 24, 64, 10)
_SMALL_ENSEMBLE = EnsembleConfig(3, 2, 3, 8, 16, 4, 2)

_OWN = (
    Example(
        "bert_large_layer",
        bert_large_layer,
        _rows(512, 1024),
        2,
        n_parameters=12_596_224,
        small=Example("bert_large_layer", lambda: bert_layer(_SMALL_BERT), _rows(16, 32), 2),
    ),
    Example(
        "bert_large",
        lambda: Bert(BertConfig()),
        padded_tokens(512, 30522),
        1,
        30522,
        335_174_458,
        small=Example("bert_large", lambda: Bert(_SMALL_BERT), padded_tokens(16, 50), 2, 50),
    ),
    Example(
        "gpt2",
        lambda: Gpt(GptConfig()),
        tokens(512, 50257),
        1,
        50257,
        124_439_808,
        small=Example("gpt2", lambda: Gpt(_SMALL_GPT), tokens(16, 50), 2, 50),
    ),
    Example(
        "llama_135m",
        lambda: Llama(LlamaConfig()),
        tokens(512, 49152),
        1,
        49152,
        134_515_008,
        small=Example("llama_135m", lambda: Llama(_SMALL_LLAMA), tokens(12, 50), 2, 50),
    ),
    Example(
        "wavenet",
        lambda: WaveNet(WaveNetConfig()),
        tokens(4096, 256),
        1,
        256,
        1_267_328,
        small=Example("wavenet", lambda: WaveNet(_SMALL_WAVENET), tokens(24, 16), 2, 16),
    ),
    Example(
        "lstm",
        LstmClassifier,
        _rows(32, 128),
        16,
        10,
        397_834,
        small=Example("lstm", lambda: LstmClassifier(6, 8), _rows(5, 6), 3, 10),
    ),
    Example(
        "dlrm",
        lambda: Dlrm(DlrmConfig()),
        visits(DlrmConfig()),
        256,
        n_parameters=33_779_521,
        loss_of=clicks,
        small=Example("dlrm", lambda: Dlrm(_SMALL_DLRM), visits(_SMALL_DLRM), 6, loss_of=clicks),
    ),
    Example(
        "mlp_mixer",
        lambda: Mixer(MixerConfig()),
        images(224),
        8,
        1000,
        59_880_472,
        small=Example("mlp_mixer", lambda: Mixer(_SMALL_MIXER), images(16), 3, 10),
    ),
    Example(
        "yolo_block",
        YoloBlock,
        images(64, 128),
        4,
        n_parameters=202_368,
        small=Example("yolo_block", lambda: YoloBlock(16, 2), images(8, 16), 2),
    ),
    Example(
        "unet_2d",
        UNet2d,
        images(256),
        1,
        n_parameters=31_037_698,
        small=Example("unet_2d", lambda: UNet2d(3, 2, 8, 2), images(16), 2),
    ),
    Example(
        "unet_3d_ensemble",
        lambda: EnsembleUNet(EnsembleConfig()),
        ensembles(EnsembleConfig()),
        1,
        n_parameters=1_367_346,
        loss_of=crps,
        small=Example(
            "unet_3d_ensemble",
            lambda: EnsembleUNet(_SMALL_ENSEMBLE),
            ensembles(_SMALL_ENSEMBLE),
            2,
            loss_of=crps,
        ),
    ),
    Example("digits_cnn", DigitsConvNet, images(8, 1), 64, 10, 19_562),
    Example("digits_transformer", DigitsTransformer, images(8, 1), 64, 10, 101_706),
)

EXAMPLES: dict[str, Example] = {e.name: e for e in (*vision.EXAMPLES, *_OWN)}

__all__ = [
    "EXAMPLES",
    "DigitsConvNet",
    "DigitsTransformer",
    "Example",
    "bert_large_layer",
    "without_dropout",
]
