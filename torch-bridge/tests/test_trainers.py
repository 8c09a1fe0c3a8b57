"""Trainers of other packages around a compiled model: twenty steps to eager's losses."""

import copy

import accelerate
import lightning
import pytest
import torch
import torch.nn.functional as F
import transformers
from loss_curves import N_STEPS, WRAPS, Tower, assert_same_curve, compare_training, rows_and_labels
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_model, save_model
from shorthaul._call import recorded
from test_transformers import bert, tokens
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
]
wraps = pytest.mark.parametrize("wrap", WRAPS)


def loader():
    """Batches of rows in a fixed order."""
    return DataLoader(TensorDataset(*rows_and_labels(36)), batch_size=12)


class Sentences(torch.utils.data.Dataset):
    """Token sequences with classes, as a trainer takes them."""

    def __init__(self):
        batch, labels = tokens()
        self.rows = [
            {"labels": label, **{name: value[i] for name, value in batch.items()}}
            for i, label in enumerate(labels)
        ]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def hugging_face_losses(model, folder, **options):
    """The losses that ``transformers.Trainer`` logs."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=N_STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=2e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
        **options,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=Sentences())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_hugging_face_trainer(tmp_path):
    model = bert(n_layers=1)
    eager = hugging_face_losses(copy.deepcopy(model), tmp_path)
    with recorded() as calls:
        found = hugging_face_losses(
            copy.deepcopy(model),
            tmp_path,
            torch_compile=True,
            torch_compile_backend="shorthaul",
        )
    assert_same_curve(found, eager)
    assert len(calls) >= 2 * N_STEPS


def test_hugging_face_trainer_of_a_compiled_module(tmp_path):
    model = bert(n_layers=1)
    eager = hugging_face_losses(copy.deepcopy(model), tmp_path)
    with recorded() as calls:
        found = hugging_face_losses(WRAPS["module"](copy.deepcopy(model)), tmp_path)
    assert_same_curve(found, eager)
    assert len(calls) >= 2 * N_STEPS


def accelerated(model, **options):
    """Losses of a loop with ``accelerate``, which accumulates gradients and clips them."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=3, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader())
    losses = []
    for _ in range(N_STEPS):
        total = 0.0
        for rows, labels in batches:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(rows), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.item() / 3
        losses.append(total)
    return losses


def test_accelerate():
    model = Tower()
    eager = accelerated(copy.deepcopy(model))
    plugin = accelerate.utils.TorchDynamoPlugin(backend="shorthaul")
    with recorded() as calls:
        found = accelerated(copy.deepcopy(model), dynamo_plugin=plugin)
    assert_same_curve(found, eager)
    assert len(calls) >= 3 * N_STEPS


@wraps
def test_accelerate_of_a_compiled_model(wrap):
    compare_training(Tower(), accelerated, wrap)


class Lit(lightning.LightningModule):
    """A classifier that keeps its losses."""

    def __init__(self, tower):
        super().__init__()
        self.tower = tower
        self.losses = []

    def training_step(self, batch, _):
        rows, labels = batch
        loss = F.cross_entropy(self.tower(rows), labels)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


@wraps
def test_lightning(wrap, tmp_path):
    def train(tower):
        module = Lit(tower)
        trainer = lightning.Trainer(
            max_steps=N_STEPS,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=1.0,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader(TensorDataset(*rows_and_labels(12)), batch_size=12))
        return module.losses

    compare_training(Tower(), train, wrap)


@wraps
@pytest.mark.parametrize("is_compiled_first", [False, True])
def test_peft(wrap, is_compiled_first):
    """Only the low-rank matrices learn; the model is compiled before they are added, or after."""

    def adapted(model):
        config = LoraConfig(r=4, lora_alpha=8, target_modules=["up", "down"], lora_dropout=0.0)
        torch.manual_seed(1)
        return get_peft_model(model, config)

    def train(model):
        learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert 0 < len(learned) < len(list(model.parameters()))
        optimizer = torch.optim.AdamW(learned, lr=1e-2)
        losses = []
        for _ in range(N_STEPS):
            rows, labels = rows_and_labels()
            loss = F.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model = Tower()
    eager = train(adapted(copy.deepcopy(model)))
    torch._dynamo.reset()
    compiled = copy.deepcopy(model)
    if is_compiled_first:
        compiled = adapted(WRAPS[wrap](compiled))
    else:
        compiled = WRAPS[wrap](adapted(compiled))
    with recorded() as calls:
        found = train(compiled)
    assert_same_curve(found, eager)
    assert len(calls) >= N_STEPS


@wraps
def test_safetensors(wrap, tmp_path):
    """Weights that a compiled model wrote go on in eager, and back."""
    file = tmp_path / "model.safetensors"

    def train(model, optimizer, losses):
        for _ in range(N_STEPS // 2):
            rows, labels = rows_and_labels()
            loss = F.cross_entropy(model(rows), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    def train_in_two_halves(model, compiled):
        losses = []
        train(compiled, torch.optim.SGD(compiled.parameters(), lr=0.3), losses)
        save_model(compiled, str(file))
        with torch.no_grad():
            for parameter in model.parameters():
                nn.init.zeros_(parameter)
        load_model(compiled, str(file))
        train(compiled, torch.optim.SGD(compiled.parameters(), lr=0.3), losses)
        return losses

    model = Tower()
    twin = copy.deepcopy(model)
    eager = train_in_two_halves(twin, twin)
    torch._dynamo.reset()
    compiled = WRAPS[wrap](model)
    with recorded() as calls:
        found = train_in_two_halves(model, compiled)
    assert_same_curve(found, eager)
    assert len(calls) >= N_STEPS
