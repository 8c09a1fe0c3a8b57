"""Models of ``transformers``, made from configurations: training, then ``generate``."""

import copy

import pytest
import torch
import transformers
from loss_curves import N_STEPS, WRAPS, compare_training
from shorthaul._call import recorded

wraps = pytest.mark.parametrize("wrap", WRAPS)

#: Names of options that make a model the same function in every call.
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}


def bert(n_layers=2):
    """A classifier of short token sequences."""
    config = transformers.BertConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=n_layers,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        problem_type="single_label_classification",
    )
    return transformers.BertForSequenceClassification(config)


def gpt2():
    """A language model."""
    config = transformers.GPT2Config(
        vocab_size=32,
        n_positions=48,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=31,
        pad_token_id=31,
        loss_type="ForCausalLM",
        **NO_DROPOUT,
    )
    return transformers.GPT2LMHeadModel(config)


def tokens():
    """Four sequences of twelve tokens, two of them padded, with a class each."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 31, (4, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = mask[2, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}, torch.tensor([0, 1, 2, 1])


def trained(labels_of):
    """A function that trains a model and gives its losses."""

    def train(model):
        batch, classes = tokens()
        batch["labels"] = labels_of(batch, classes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
        losses = []
        for _ in range(N_STEPS):
            loss = model(**batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return train


@wraps
@pytest.mark.filterwarnings("error::shorthaul.FallbackWarning")
def test_bert(wrap):
    compare_training(bert(), trained(lambda batch, classes: classes), wrap)


# The loss is a function that `transformers` chooses while the model runs, which breaks the graph.
@pytest.mark.filterwarnings("ignore:.*is compiled in several parts:shorthaul.FallbackWarning")
@pytest.mark.filterwarnings("error:PyTorch runs a part:shorthaul.FallbackWarning")
@pytest.mark.filterwarnings("ignore::shorthaul.RecompileWarning")
@wraps
def test_gpt2_and_then_generate(wrap):
    """The trained model continues a text with a cache of keys and values, as eager does."""
    model = gpt2()
    compiled = compare_training(model, trained(lambda batch, classes: batch["input_ids"]), wrap)
    eager = copy.deepcopy(model)
    state = {name.removeprefix("_orig_mod."): v for name, v in compiled.state_dict().items()}
    eager.load_state_dict(state)
    batch, _ = tokens()
    ids = batch["input_ids"]
    given = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    with recorded() as calls:
        found = compiled.eval().generate(ids, **given)
    assert torch.equal(found, eager.eval().generate(ids, **given))
    if wrap == "module":
        assert calls, "generate ran through PyTorch"


@pytest.mark.filterwarnings("error::shorthaul.FallbackWarning")
def test_gpt2_with_a_cache_of_fixed_size():
    """One step of generation, whose cache is written in place."""
    model = gpt2().eval()
    compiled = WRAPS["compile"](copy.deepcopy(model))
    batch, _ = tokens()
    results = []
    for one in (model, compiled):
        cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        with torch.no_grad(), recorded() as calls:
            logits = one(batch["input_ids"], past_key_values=cache, use_cache=True).logits
            last = logits[:, -1:].argmax(-1)
            for _ in range(3):
                logits = one(last, past_key_values=cache, use_cache=True).logits
                last = logits.argmax(-1)
        results.append((logits, cache.layers[0].keys, cache.layers[1].values))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert calls, "it ran through PyTorch"
