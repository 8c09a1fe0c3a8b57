"""Programs with recurrent networks, attention, transformers and embeddings."""

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import rnn
from torch.utils.checkpoint import checkpoint

from .facts import gradients, observe, raises, randn, step, training
from .registry import program


def _recurrent(name, make, width=4):
    @program(name=name, slack=3)
    def recurrent(wrap):
        model = make()
        m = wrap(model)
        return [training(model, m, randn(n, 2, width)) for n in (3, 5)]


_recurrent("gru", lambda: nn.GRU(4, 3))
_recurrent("lstm", lambda: nn.LSTM(4, 3))
_recurrent("rnn", lambda: nn.RNN(4, 3, nonlinearity="relu"))
_recurrent("gru_of_two_layers_both_ways", lambda: nn.GRU(4, 3, 2, bidirectional=True))
_recurrent("lstm_batch_first", lambda: nn.LSTM(4, 3, batch_first=True, bias=False))
_recurrent("lstm_projected", lambda: nn.LSTM(4, 3, proj_size=2))


@program(slack=3)
def lstm_state_carried_over(wrap):
    model = nn.LSTM(3, 4)
    m, state, seen = wrap(model), None, []
    for _ in range(3):
        model.zero_grad()
        out, state = m(torch.randn(2, 1, 3), state)
        state = tuple(s.detach() for s in state)
        out.sum().backward()
        seen.append([observe(out), observe(state), gradients(model)])
    return seen


@program(slack=3)
def gru_over_packed_sequence(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(3, 4, batch_first=True)

        def forward(self, x, lengths):
            packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, h = self.rnn(packed)
            return rnn.pad_packed_sequence(out, batch_first=True)[0], h

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(3, 4, 3), torch.tensor(n)) for n in ([4, 2, 1], [1, 3, 4])]


@program(slack=3)
def packed_sequence_as_input(wrap):
    model = nn.LSTM(3, 4)
    m, x = wrap(model), [torch.randn(n, 3) for n in (4, 2, 1)]
    out, (h, _) = m(rnn.pack_sequence(x))
    out.data.sum().backward()
    return [out.data, out.batch_sizes, h, gradients(model)]


class _Packed(nn.Module):
    """Rows of several lengths through a recurrent layer between two linear ones."""

    def __init__(self, layer, width):
        super().__init__()
        self.before, self.layer, self.after = nn.Linear(3, 4), layer, nn.Linear(width, 2)

    def forward(self, x, lengths, state=None, is_sorted=False):
        first = self.layer.batch_first
        x = self.before(x).tanh()
        packed = rnn.pack_padded_sequence(x, lengths, first, enforce_sorted=is_sorted)
        out, state = self.layer(packed, state)
        padded, counted = rnn.pad_packed_sequence(out, first, padding_value=0.5)
        return self.after(padded), counted, out.batch_sizes, state


def _packed(name, kind, width, state=(), **options):
    @program(name=f"packed_{name}", slack=3)
    def packed(wrap):
        model = _Packed(kind(4, 5, **options), width)
        m, seen = wrap(model), []
        for lengths in ([5, 3, 1], [2, 5, 4], [4, 4, 4]):
            rows = (3, 5) if options.get("batch_first") else (5, 3)
            given = tuple(randn(*sizes) for sizes in state) or None
            given = given[0] if given and len(given) == 1 else given
            ordered = lengths == sorted(lengths, reverse=True)
            args = randn(*rows, 3), torch.tensor(lengths), given, ordered
            seen.append(training(model, m, *args))
        return seen


_packed("lstm", nn.LSTM, 5)
_packed("lstm_batch_first", nn.LSTM, 5, batch_first=True)
_packed("lstm_of_two_layers_both_ways", nn.LSTM, 10, num_layers=2, bidirectional=True)
_packed("lstm_projected", nn.LSTM, 2, ((1, 3, 2), (1, 3, 5)), proj_size=2)
_packed("lstm_with_state", nn.LSTM, 10, 2 * ((4, 3, 5),), num_layers=2, bidirectional=True)
_packed("gru_both_ways", nn.GRU, 10, bidirectional=True, bias=False)
_packed("gru_with_state", nn.GRU, 5, ((2, 3, 5),), num_layers=2)
_packed("rnn", nn.RNN, 5, nonlinearity="relu")
_packed("rnn_with_state", nn.RNN, 5, ((1, 3, 5),), batch_first=True)


@program(slack=3)
def packed_lstm_with_dropout_between_layers(wrap):
    model = _Packed(nn.LSTM(4, 20, 2, dropout=0.5), 20)
    m, x, lengths = wrap(model), torch.randn(4, 2, 3), torch.tensor([4, 2])
    seen = []
    for _ in range(2):
        # PyTorch draws the masks of its own layer, here and in eager.
        torch.manual_seed(5)
        seen.append(training(model, m, x, lengths))
    differ = not torch.equal(m(x, lengths)[0], m(x, lengths)[0])
    model.eval()
    return [seen, differ, m(x, lengths)[0]]


@program(slack=3)
def cells_in_a_python_loop(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.LSTMCell(3, 4), nn.Linear(4, 1)

        def forward(self, x):
            h = c = x.new_zeros(x.shape[1], 4)
            outs = []
            for t in range(x.shape[0]):
                h, c = self.cell(x[t], (h, c))
                outs.append(self.head(h))
            return torch.stack(outs)

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(n, 2, 3)) for n in (3, 5, 2)]


@program
def dropout_between_recurrent_layers(wrap):
    model = nn.GRU(3, 20, 2, dropout=0.5)
    m, x = wrap(model), torch.randn(4, 2, 3)
    differ = not torch.equal(m(x)[0], m(x)[0])
    model.eval()
    return [differ, m(x)]


@program(slack=3)
def decoder_with_teacher_forcing(wrap):
    import random

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.cell, self.head = (
                nn.Embedding(5, 3),
                nn.GRUCell(3, 4),
                nn.Linear(4, 5),
            )

        def forward(self, targets):
            h, token, outs = torch.zeros(targets.shape[0], 4), targets[:, 0], []
            for t in range(1, targets.shape[1]):
                h = self.cell(self.embedding(token), h)
                logits = self.head(h)
                outs.append(logits)
                token = targets[:, t] if random.random() < 0.5 else logits.argmax(-1)
            return torch.stack(outs, 1)

    model = Model()
    m, targets = wrap(model), torch.randint(0, 5, (2, 5))
    return [training(model, m, targets) for _ in range(3)]


def _attention(name, **kwargs):
    @program(name=f"attention_{name}", slack=3)
    def attention(wrap):
        make = {k: v() if callable(v) else v for k, v in kwargs.items()}
        m = wrap(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, **make))
        return step(m, randn(2, 2, 3, 4), randn(2, 2, 5, 4), randn(2, 2, 5, 4))


_attention("plain")
_attention("causal", is_causal=True)
_attention("boolean_mask", attn_mask=lambda: torch.ones(3, 5, dtype=torch.bool).tril(1))
_attention("float_mask", attn_mask=lambda: torch.randn(2, 1, 3, 5))
_attention("row_masked_out", attn_mask=lambda: torch.tensor([[True] * 5, [False] * 5, [True] * 5]))
_attention("scaled", scale=0.3)


@program(slack=3)
def attention_with_grouped_queries(wrap):
    def forward(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    return raises(step, wrap(forward), randn(1, 4, 3, 4), randn(1, 2, 3, 4), randn(1, 2, 3, 4))


@program(slack=3)
def multihead_attention_with_masks(wrap):
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    m, x = wrap(model), randn(2, 4, 8)
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    seen = []
    for kwargs in (
        {"key_padding_mask": padding},
        {"attn_mask": causal, "need_weights": False},
        {"key_padding_mask": padding, "average_attn_weights": False},
    ):
        model.zero_grad()
        seen.append([step(lambda x, kw=kwargs: m(x, x, x, **kw), x), gradients(model)])
    model.eval()
    with torch.no_grad():
        return [seen, m(x, x, x, key_padding_mask=padding)]


@program(slack=3)
def multihead_attention_with_other_widths(wrap):
    model = nn.MultiheadAttention(8, 2, kdim=3, vdim=5, add_bias_kv=True, add_zero_attn=True)
    return training(model, wrap(model), randn(3, 2, 8), randn(4, 2, 3), randn(4, 2, 5))


@program(slack=5)
def transformer_encoder(wrap):
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    m = wrap(model)
    padding = torch.tensor([[False, False, True], [False, False, False]])
    seen = [training(model, m, randn(2, 3, 8)), training(model, m, randn(2, 3, 8), None, padding)]
    model.eval()
    with torch.no_grad():
        return [
            seen,
            m(torch.randn(2, 3, 8)),
            m(torch.randn(2, 3, 8), src_key_padding_mask=padding),
        ]


@program(slack=5)
def transformer_encoder_that_leaves_padding_out(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8))

        def forward(self, x, padding):
            return self.encoder(x * 2, src_key_padding_mask=padding).mean(1)

    model = Model()
    m = wrap(model)
    paddings = torch.tensor([[[0, 0, 1, 1], [0, 0, 0, 0]], [[0, 1, 0, 1], [1, 0, 0, 0]]]).bool()
    seen = [training(model, m, randn(2, 4, 8), padding) for padding in paddings]
    model.eval()
    with torch.no_grad():
        seen += [m(torch.randn(2, 4, 8), padding) for padding in paddings]
        whole = wrap(model.encoder)
        seen += [whole(torch.randn(2, 4, 8), None, padding) for padding in paddings]
        seen.append(whole(torch.randn(2, 4, 8)))
    return [*seen, m(torch.randn(2, 4, 8), paddings[0])]


@program(slack=5)
def transformer_encoder_layers_in_inference(wrap):
    causal = nn.Transformer.generate_square_subsequent_mask(3)
    padding = torch.tensor([[False, False, True], [True, True, True]])
    options = [{}, {"norm_first": True}, {"activation": "gelu"}]
    seen = []
    for given in options:
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **given).eval()
        m = wrap(layer)
        with torch.no_grad():
            x = torch.randn(2, 3, 8)
            seen += [m(x), m(x, src_mask=causal), m(x, src_key_padding_mask=padding)]
            seen.append(m(x, src_mask=causal.isinf(), src_key_padding_mask=padding))
            seen.append(m(torch.randn(1, 5, 8)))
    return seen


@program(slack=3)
def multihead_attention_in_inference(wrap):
    model = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    m = wrap(model)
    mask = torch.tensor([[False, True, True], [False, False, True], [True, True, True]])
    with torch.no_grad():
        x = torch.randn(2, 3, 8)
        seen = [m(x, x, x, need_weights=need)[0] for need in (False, True)]
        seen += [m(x, x, x), m(x, x, x, average_attn_weights=False)]
        return [*seen, m(x, x, x, attn_mask=mask), m(x, x, torch.randn(2, 3, 8))]


@program(slack=5)
def transformer_decoder(wrap):
    model = nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
    m = wrap(model)
    mask = nn.Transformer.generate_square_subsequent_mask(3)
    return training(model, m, randn(2, 3, 8), randn(2, 4, 8), tgt_mask=mask, tgt_is_causal=True)


@program(slack=5)
def transformer_whole(wrap):
    model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
    m = wrap(model)
    return [training(model, m, randn(2, n, 8), randn(2, 2, 8)) for n in (3, 4)]


@program(slack=5)
def language_model_of_changing_length(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.places = nn.Embedding(11, 8), nn.Embedding(16, 8)
            self.block = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.head = nn.Linear(8, 11, bias=False)
            self.head.weight = self.tokens.weight

        def forward(self, tokens):
            n = tokens.shape[1]
            x = self.tokens(tokens) + self.places(torch.arange(n))
            mask = torch.full((n, n), float("-inf")).triu(1)
            logits = self.head(self.block(x, mask))
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    model = Model()
    m = wrap(model)
    return [training(model, m, torch.randint(0, 11, (b, n))) for b, n in ((2, 5), (2, 7), (1, 3))]


@program(slack=3)
def greedy_generation(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.fc = nn.Embedding(7, 6), nn.Linear(6, 7)

        def forward(self, tokens):
            return self.fc(self.embedding(tokens).cumsum(1).tanh())

    m, tokens = wrap(Model()), torch.tensor([[1, 2]])
    with torch.no_grad():
        for _ in range(6):
            tokens = torch.cat([tokens, m(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    return tokens


@program
def relative_position_bias(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Embedding(9, 2)

        def forward(self, x):
            n = x.shape[-2]
            distance = torch.arange(n)[:, None] - torch.arange(n)[None, :]
            bias = self.bias(distance.clamp(-4, 4) + 4).permute(2, 0, 1)
            return (x @ x.mT + bias).softmax(-1) @ x

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(1, 2, n, 3)) for n in (3, 6, 4)]


@program(slack=3)
def rotary_embedding(wrap):
    def forward(x):
        n, d = x.shape[-2:]
        angle = torch.arange(n)[:, None] / 10000 ** (torch.arange(0, d, 2) / d)
        sin, cos = angle.sin().repeat(1, 2), angle.cos().repeat(1, 2)
        half = torch.cat([-x[..., d // 2 :], x[..., : d // 2]], -1)
        return x * cos + half * sin

    m = wrap(forward)
    return [step(m, randn(1, n, 4)) for n in (3, 5)]


@program
def embedding_with_padding(wrap):
    model = nn.Embedding(6, 3, padding_idx=0)
    return training(model, wrap(model), torch.tensor([[0, 1, 1], [5, 0, 2]]))


@program
def embedding_with_sparse_gradient(wrap):
    model = nn.Embedding(6, 3, sparse=True)
    m = wrap(model)

    def run():
        m(torch.tensor([1, 1, 4])).sum().backward()
        return [model.weight.grad.is_sparse, model.weight.grad.to_dense()]

    return raises(run)


@program
def embedding_with_largest_norm(wrap):
    model = nn.Embedding(6, 3, max_norm=1.0)

    def run():
        model.weight.requires_grad_(False)
        return [observe(wrap(model)(torch.tensor([1, 4]))), observe(model.weight)]

    return raises(run)


@program
def embedding_scaled_by_frequency(wrap):
    model = nn.Embedding(6, 3, scale_grad_by_freq=True)
    return raises(training, model, wrap(model), torch.tensor([1, 1, 1, 4]))


@program
def embedding_of_short_integers(wrap):
    model = nn.Embedding(6, 3)
    m = wrap(model)
    return [
        raises(training, model, m, torch.tensor([1, 2], dtype=d))
        for d in (torch.int32, torch.int64)
    ]


@program
def embedding_of_nothing(wrap):
    model = nn.Embedding(6, 3)
    return training(model, wrap(model), torch.zeros(0, 4, dtype=torch.int64))


def _bag(mode):
    @program(name=f"embedding_bag_{mode}")
    def bag(wrap):
        model = nn.EmbeddingBag(6, 3, mode=mode)
        m = wrap(model)
        tokens = torch.tensor([1, 2, 4, 5, 4])
        flat = raises(training, model, m, tokens, torch.tensor([0, 2, 2]))
        return [flat, raises(training, model, m, torch.tensor([[1, 2], [3, 3]]))]


for _mode in ("sum", "mean", "max"):
    _bag(_mode)


@program(slack=3)
def embedding_bags_of_one_length(wrap):
    options = [{"mode": "sum"}, {"mode": "mean"}, {"padding_idx": 2}, {"scale_grad_by_freq": True}]
    options += [{"mode": "sum", "padding_idx": 0}, {"mode": "mean", "padding_idx": 0}]
    seen = []
    for given in options:
        model = nn.EmbeddingBag(6, 3, **given)
        nn.init.normal_(model.weight)
        m = wrap(model)
        sizes = ((3, 2), (5, 4), (1, 3), (2, 1), (0, 3))
        seen += [training(model, m, torch.randint(0, 6, size)) for size in sizes]
        seen.append(raises(m, torch.tensor([[1, 6], [3, 3]])))
    weighted = nn.EmbeddingBag(6, 3, mode="sum")
    at, by = torch.tensor([[1, 2], [3, 3]], dtype=torch.int32), randn(2, 2)
    return [*seen, training(weighted, wrap(weighted), at, None, by)]


@program
def embedding_renormalized_by_caller(wrap):
    model = nn.Embedding(4, 3)
    m = wrap(model)
    first = training(model, m, torch.tensor([1, 2]))
    with torch.no_grad():
        model.weight[1] = 0
    return [first, training(model, m, torch.tensor([1, 2]))]


@program
def windows_by_roll_and_partition(wrap):
    def forward(x):
        b, h, w, c = x.shape
        x = torch.roll(x, (-1, -1), (1, 2)).view(b, h // 2, 2, w // 2, 2, c)
        x = x.permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        return (x @ x.mT).softmax(-1) @ x

    m = wrap(forward)
    return [step(m, randn(1, *s, 3)) for s in ((4, 4), (4, 6))]


class _Stateful(nn.Module):
    """A recurrent layer that keeps its state, history included, and begins from ``start`` of it."""

    def __init__(self, start):
        super().__init__()
        self.fc, self.start, self.state = nn.Linear(4, 4), start, torch.zeros(3, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x):
        state = self.start(self.state)
        for _ in range(2):
            state = 0.9 * state + self.fc(x)
        self.state = state
        return state.tanh() + torch.zeros_like(self.scale)


def _steps(wrap, start):
    model = _Stateful(start)
    m = wrap(model)
    return [training(model, m, randn(3, 4)) for _ in range(3)], model.scale.grad is None


@program
def state_begins_with_zeros(wrap):
    return _steps(wrap, torch.zeros_like)


@program
def state_begins_detached(wrap):
    return _steps(wrap, torch.Tensor.detach)


@program
def state_begins_with_what_it_exceeds(wrap):
    return _steps(wrap, lambda state: (state > 0.1).to(state.dtype))


@program
def state_is_only_a_look(wrap):
    return _steps(wrap, lambda state: torch.ones(4).expand_as(state) + state.new_full((4,), 2.0))


@program
def state_of_two_steps_before(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.states = nn.Linear(4, 4), [torch.zeros(3, 4)]

        def forward(self, x):
            old = self.states[-1]
            new = self.fc(x) + old.detach() * torch.empty_like(old).fill_(0.5)
            self.states = [new]
            return new.relu()

    model = Model()
    m = wrap(model)
    return [training(model, m, randn(3, 4)) for _ in range(3)]


@program
def sizes_of_embeddings_in_a_checkpoint(wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.head = nn.Embedding(10, 6), nn.Linear(6, 3)

        def run(self, tokens):
            x = self.table(torch.cat([tokens, tokens], 1)).tanh()
            size = x.size()[:2]
            rows = self.head(x.view(size[0] * size[1], -1))
            return rows.view(*size, -1), rows.view(size[0], x.size(1) // 2, -1)

        def forward(self, tokens):
            return checkpoint(self.run, tokens, use_reentrant=False)

    model = Model()
    m = wrap(model)
    return [training(model, m, torch.randint(10, (n, n + 2))) for n in (3, 5, 4)]


@program
def bags_and_where_they_are(wrap):
    m = wrap(lambda x: torch.embedding_bag(x, torch.tensor([0, 1, 2]), torch.tensor([0, 2])))
    return step(m, randn(4, 3))
