//! Every network of this room in a size for tests, by name.
//!
//! Owns these sizes. `torch-bridge/tests/test_rust_networks.py` has the same networks as PyTorch modules, six of them
//! as `small` of `shorthaul.models.EXAMPLES`. The other networks of that list consist of the same blocks, or are
//! captured from PyTorch only.

use crate::convolutional::{mobilenet_v2, resnet};
use crate::grids::{Ensemble, Mixer, UNet2d, YoloBlock, ensemble_unet, mixer, unet_2d, yolo_block};
use crate::recommendation::{Dlrm, dlrm};
use crate::sequences::{LstmClassifier, WaveNet, lstm_classifier, wavenet};
use crate::transformer::{Decoder, Encoder, decoder_layer, encoder_layer};
use graph::{DType, Graph};
use ops::OpError;

/// Builds a network.
type Make = fn() -> Result<Graph, OpError>;

/// The networks by name, in a size for tests.
pub const SMALL: [(&str, Make); 11] = [
    ("resnet", || resnet(2, 48, [1, 1, 1, 1])),
    ("mobilenet_v2", || mobilenet_v2(3, 64)),
    ("encoder_layer", || encoder_layer(ENCODER)),
    ("decoder_layer", || decoder_layer(DECODER, DType::F32)),
    ("lstm", || lstm_classifier(LSTM)),
    ("wavenet", || wavenet(WAVENET)),
    ("dlrm", || dlrm(&small_dlrm())),
    ("mlp_mixer", || mixer(MIXER)),
    ("yolo_block", || yolo_block(YOLO)),
    ("unet_2d", || unet_2d(UNET)),
    ("unet_3d_ensemble", || ensemble_unet(ENSEMBLE)),
];

const ENCODER: Encoder = Encoder {
    batch: 2,
    length: 5,
    hidden: 12,
    heads: 3,
    inner: 20,
};

const DECODER: Decoder = Decoder {
    batch: 2,
    length: 5,
    hidden: 16,
    heads: 4,
    key_heads: 2,
    inner: 24,
};

const LSTM: LstmClassifier = LstmClassifier {
    batch: 3,
    length: 5,
    n_inputs: 6,
    width: 8,
    n_layers: 2,
    n_out: 10,
};

const WAVENET: WaveNet = WaveNet {
    batch: 2,
    length: 24,
    n_levels: 16,
    width: 8,
    n_skip: 16,
    n_stacks: 1,
    n_dilations: 3,
};

fn small_dlrm() -> Dlrm {
    Dlrm {
        batch: 6,
        n_numbers: 4,
        n_tables: 3,
        n_rows: 20,
        n_looked_up: 2,
        width: 8,
        bottom: vec![16],
        top: vec![16],
    }
}

const MIXER: Mixer = Mixer {
    batch: 3,
    side: 16,
    patch: 4,
    width: 32,
    n_layers: 2,
    n_token_inner: 24,
    n_channel_inner: 64,
    n_classes: 10,
};

const YOLO: YoloBlock = YoloBlock {
    batch: 2,
    side: 8,
    width: 16,
    n_layers: 2,
};

const UNET: UNet2d = UNet2d {
    batch: 2,
    side: 16,
    n_in: 3,
    n_classes: 2,
    width: 8,
    depth: 2,
};

const ENSEMBLE: Ensemble = Ensemble {
    batch: 2,
    n_members: 3,
    n_fields: 2,
    n_levels: 3,
    height: 8,
    width: 16,
    channels: 4,
    depth: 2,
};
