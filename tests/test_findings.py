"""What the findings of docs/ were measured with: the scripts at a reduced size, and the results that are shown."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

FOLDER = Path(__file__).resolve().parents[1] / "training" / "findings"


@pytest.fixture
def induction(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("induction")


def test_texts_repeat_a_block_and_tell_what_is_known(induction: ModuleType) -> None:
    ids, known = induction.texts(50, torch.Generator().manual_seed(0))
    for row, told in zip(ids, known, strict=True):
        period = int((~told).sum())
        assert induction.SHORTEST <= period <= induction.LONGEST
        assert not told[:period].any()
        assert torch.equal(row[period:], row[:-period])


def test_rotary_logits_depend_on_the_distance(induction: ModuleType) -> None:
    small = importlib.import_module("small")
    q, k = torch.randn(2, 8, dtype=torch.float64)
    logits = small.rotated(q.expand(30, 8)) @ small.rotated(k.expand(30, 8)).T
    torch.testing.assert_close(logits[1:, 1:], logits[:-1, :-1])
    torch.testing.assert_close(logits[0, 0], q @ k)
    assert (logits[0] - logits[0, 0]).abs().max() > 0.1


def test_a_reduced_training_lowers_the_loss_and_scores_every_checkpoint(induction: ModuleType) -> None:
    model, history = induction.measure(0, steps=40, every=13, batch=16, length=300)
    assert [point["step"] for point in history] == [0, 13, 26, 39]
    assert history[-1]["loss"] < history[0]["loss"] - 0.05
    assert all(point[name].shape == (2, 4) for point in history for name in ("previous", "induction"))
    assert all(point["far"].shape == (4,) for point in history)
    torch.manual_seed(0)  # the model of the first checkpoint
    before = induction.far_scores(induction.near(induction.Transformer(induction.SYMBOLS)), induction.far_text(300))
    torch.testing.assert_close(history[0]["far"], before)
    ids = torch.randint(32, (2, 12)).repeat(1, 2)
    with torch.no_grad():
        found = induction.scores(model, ids)
        x = model.blocks[0].norm(model.embed(ids))
        q, k, _ = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in model.blocks[0].attn.qkv(x).chunk(3, -1))
        small = importlib.import_module("small")
        logits = small.rotated(q) @ small.rotated(k).mT / 4
        weights = logits.masked_fill(torch.ones(24, 24).triu(1).bool(), -torch.inf).softmax(-1)
    # Query 1 sees a key beside the token before it, as every later one does.
    torch.testing.assert_close(found["previous"][0], weights.diagonal(-1, -2, -1).mean((0, 2)))


def test_results_show_what_the_page_says(induction: ModuleType) -> None:
    runs = json.loads((FOLDER / "induction.json").read_text(encoding="utf-8"))
    assert [run["seed"] for run in runs] == list(induction.SEEDS)
    for run in runs:
        best = {point["step"]: max(point["induction"][1]) for point in run["history"]}
        loss = {point["step"]: point["loss"] for point in run["history"]}
        assert best[0] < 0.065
        assert best[140] < 0.18
        assert best[180] > 0.73
        assert best[490] - best[180] < 0.075
        assert loss[140] > 2.75
        assert loss[180] < 1.15
        half = next(step for step, score in best.items() if score > (best[0] + best[490]) / 2)
        assert half in (160, 170)
        far = {point["step"]: max(point["far"]) for point in run["history"]}
        assert far[0] == pytest.approx(1 / 32, abs=1e-4)  # equal weights
        assert round(far[100], 3) == 0.032
        assert 0.0355 < far[140] < 0.0415
        assert 0.265 < far[180] < 0.415
        assert 0.565 < far[490] < 0.595
        assert next(step for step, score in far.items() if score > (far[0] + far[490]) / 2) - half in (10, 20)


def test_weights_are_those_of_the_last_checkpoint(induction: ModuleType) -> None:
    model = induction.Transformer(induction.SYMBOLS)
    model.load_state_dict(load_file(FOLDER / "induction.safetensors"))
    half = torch.randint(32, (8, 32), generator=torch.Generator().manual_seed(1000))
    found = induction.scores(model, half.repeat(1, 2))
    (last,) = json.loads((FOLDER / "induction.json").read_text(encoding="utf-8"))[0]["history"][-1:]
    for name in ("previous", "induction"):
        torch.testing.assert_close(found[name], torch.tensor(last[name]), atol=0.01, rtol=0)


def test_scores_of_far_texts_are_those_of_the_layers(induction: ModuleType) -> None:
    torch.manual_seed(0)
    model = induction.Transformer(induction.SYMBOLS)
    ids = torch.randint(32, (1, 64), generator=torch.Generator().manual_seed(0))
    for each in (model, induction.near(model)):  # 64 tokens: the window hides none
        found = induction.far_scores(each, ids, late=64)
        torch.testing.assert_close(found, induction.scores(each, ids)["induction"][1])
    changed = induction.near(model).blocks
    assert model.blocks[1].attn.rotary
    assert not changed[1].attn.rotary
    y = torch.randn(1, 100, 64)
    late = changed[0].attn(y)[:, -1]
    y[:, 0] += 1.0
    torch.testing.assert_close(changed[0].attn(y)[:, -1], late)  # token 0 is 99 tokens back


@pytest.fixture
def contacts(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("contacts")


def test_potts_samples_follow_the_conditional_probabilities(contacts: ModuleType) -> None:
    fields, touch, couplings = contacts.potts(torch.Generator().manual_seed(0))
    assert touch.sum() == 2 * contacts.CONTACTS
    assert not touch.triu(1).tril(contacts.APART - 1).any()
    torch.testing.assert_close(couplings, couplings.permute(1, 0, 3, 2))
    assert torch.equal(couplings.flatten(2).any(-1), touch)
    x = contacts.sampled(fields, couplings, 4000, torch.Generator().manual_seed(1), sweeps=8)
    i = int(touch.sum(0).argmax())  # a site of the model: its letters given all others, against their mean frequency
    others = couplings[i][torch.arange(contacts.SITES), :, x].sum(1)  # (sequences, letters)
    expected = (fields[i] + others).softmax(-1).mean(0)
    observed = torch.bincount(x[:, i], minlength=contacts.LETTERS) / len(x)
    torch.testing.assert_close(observed, expected, atol=0.03, rtol=0)


def test_sequences_without_couplings_keep_the_letters_of_each_site(contacts: ModuleType) -> None:
    x = torch.randint(6, (50, 5), generator=torch.Generator().manual_seed(0))
    dealt = contacts.without_couplings(x, torch.Generator().manual_seed(1))
    assert torch.equal(dealt.sort(0).values, x.sort(0).values)
    assert not torch.equal(dealt, x)


def test_the_map_is_symmetric_attention_less_the_average_product(contacts: ModuleType) -> None:
    torch.manual_seed(0)
    model = contacts.encoder()
    ids = contacts.tokens(torch.randint(6, (3, contacts.SITES)))
    found = contacts.contact_map(model, ids)
    expected = torch.zeros_like(found)
    with torch.no_grad(), contacts.attlas.record(model) as atlas:
        model(ids)
    for A in atlas:
        part = A.to_dense()[:, :, 1:-1, 1:-1]
        both = part + part.mT
        product = both.sum(-1, keepdim=True) * both.sum(-2, keepdim=True) / both.sum((-1, -2), keepdim=True)
        expected += (both - product).mean(0).sum(0) / 8
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_precision_and_information_find_a_coupled_pair(contacts: ModuleType) -> None:
    x = torch.randint(6, (500, contacts.SITES), generator=torch.Generator().manual_seed(0))
    x[:, 20] = x[:, 3]
    touch = torch.zeros(contacts.SITES, contacts.SITES, dtype=torch.bool)
    touch[3, 20] = touch[20, 3] = True
    assert contacts.precision(contacts.information(x), touch, count=1) == 1.0
    assert contacts.precision(-contacts.information(x), touch, count=1) == 0.0


def test_a_reduced_training_of_the_encoder_lowers_its_loss(contacts: ModuleType) -> None:
    _, found = contacts.measure(0, steps=30, every=10, batch=32, count=400)
    assert [point["step"] for point in found["history"]] == [0, 10, 20, 30]
    assert found["history"][-1]["loss"] < found["history"][0]["loss"] - 0.2


def test_contacts_are_found_with_couplings_alone(contacts: ModuleType) -> None:
    coupled, control = json.loads((FOLDER / "contacts.json").read_text(encoding="utf-8"))
    assert (coupled["coupled"], control["coupled"]) == (True, False)
    assert round(contacts.CONTACTS * coupled["history"][-1]["precision"]) == 27
    assert round(contacts.CONTACTS * control["history"][-1]["precision"]) == 4
    assert coupled["mutual information"] == 1.0
    assert coupled["one sequence"] == pytest.approx(0.53, abs=0.005)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("kernel")


def test_best_predictions_are_those_of_a_gaussian_process(kernel: ModuleType) -> None:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF

    x, y, lengths = kernel.tables(2, torch.Generator().manual_seed(0))
    found = kernel.best(x, y[:, :64], lengths)
    for t in range(2):
        process = GaussianProcessRegressor(RBF(lengths[t].numpy()), alpha=kernel.NOISE**2, optimizer=None)
        expected = process.fit(x[t, :64].numpy(), y[t, :64].numpy()).predict(x[t, 64:].numpy())
        torch.testing.assert_close(found[t], torch.from_numpy(expected))


def test_fitted_widths_are_those_that_made_the_predictions(kernel: ModuleType) -> None:
    x, y, _ = kernel.tables(3, torch.Generator().manual_seed(0))
    widths, y = torch.tensor([0.5, 0.3], dtype=torch.float64), y[:, :64]
    predicted = (kernel.kernel(x, widths) @ y.unsqueeze(-1)).squeeze(-1)
    found = kernel.fitted_widths(x, y, predicted, start=0.4 * torch.ones(2))
    torch.testing.assert_close(found, widths, rtol=0.02, atol=0)
    assert kernel.share(predicted, predicted) == 1.0
    assert kernel.share(predicted.mean().expand_as(predicted), predicted) == pytest.approx(0.0)


def test_rows_without_outputs_tell_nothing_and_influence_is_the_derivative(kernel: ModuleType) -> None:
    torch.manual_seed(0)
    model = kernel.Rows()
    x, y, _ = (t.float() for t in kernel.tables(2, torch.Generator().manual_seed(0), known=10, asked=3))
    predicted = model(x, y[:, :10])
    torch.testing.assert_close(model(x[:, :11], y[:, :10]), predicted[:, :1])
    found = kernel.influence(model, x, y[:, :10])
    expected = torch.autograd.functional.jacobian(lambda known: model(x, known), y[:, :10])  # (t, asked, t, known)
    for t in range(2):
        torch.testing.assert_close(found[t], expected[t, :, t].double())


def test_a_reduced_training_on_tables_lowers_the_loss(kernel: ModuleType) -> None:
    model, losses = kernel.trained(0, steps=101, batch=4)
    assert len(losses) == 2
    assert losses[1] < losses[0]
    model.load_state_dict(load_file(FOLDER / "kernel.safetensors"))


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("sinks")


def test_texts_copy_behind_a_trigger_and_follow_the_chain_elsewhere(sinks: ModuleType) -> None:
    ids = sinks.texts(400, 40, torch.Generator().manual_seed(0))
    assert (ids[:, 0] == sinks.START).all()
    assert (ids[:, 1:] < sinks.SYMBOLS).all()
    before, last, token = (ids[:, i : i - 2 or None].flatten() for i in range(3))
    copied = (last < sinks.TRIGGERS) & (before != sinks.START)
    assert copied.sum() > 500
    assert torch.equal(token[copied], before[copied])
    symbol = int(torch.bincount(last[~copied])[sinks.TRIGGERS :].argmax()) + sinks.TRIGGERS
    following = token[~copied & (last == symbol)]
    observed = torch.bincount(following, minlength=sinks.SYMBOLS) / len(following)
    torch.testing.assert_close(observed, sinks.chain()[symbol], atol=0.05, rtol=0)


@pytest.mark.parametrize("gated", [False, True])
def test_first_weights_are_those_of_the_matrix_and_gates_scale_what_is_read(sinks: ModuleType, gated: bool) -> None:
    torch.manual_seed(0)
    model = sinks.Transformer(sinks.SYMBOLS + 1, layers=1, gated=gated)
    ids = sinks.texts(6, 20, torch.Generator().manual_seed(0))
    found = sinks.first_weights(model, ids)
    block = model.blocks[0]
    with torch.no_grad():
        x = block.norm(model.embed(ids))
        q, k, v = block.attn.projected(x)
        weights = (q @ k.mT / 4).masked_fill(torch.ones(20, 20).triu(1).bool(), -torch.inf).softmax(-1)
        read = weights @ v
        if gated:
            read = read * torch.sigmoid(block.attn.gate(x)).mT.unsqueeze(-1)
        torch.testing.assert_close(block.attn(x), block.attn.out(read.transpose(1, 2).flatten(2)))
    first, triggers = weights[:, :, 10:, 0].transpose(0, 1), ids[:, 10:] < sinks.TRIGGERS
    torch.testing.assert_close(found["triggers"], first[:, triggers].mean(-1))
    torch.testing.assert_close(found["others"], first[:, ~triggers].mean(-1))
    assert sinks.equal_weight(20) == pytest.approx(sum(1 / keys for keys in range(11, 21)) / 10)


def test_a_reduced_training_with_gates_lowers_both_losses(sinks: ModuleType) -> None:
    start, end = (sinks.measure(16, gated=True, seed=0, steps=steps)[1] for steps in (0, 60))
    assert all(end["loss"][name] < start["loss"][name] - 0.3 for name in ("copies", "chain"))
    assert end["first"]["others"].shape == (4,)


def test_gates_lower_the_first_weight_of_every_pair(sinks: ModuleType) -> None:
    runs = json.loads((FOLDER / "sinks.json").read_text(encoding="utf-8"))
    pairs = [(length, seed) for length in sinks.LENGTHS for seed in sinks.SEEDS]
    first = {(run["length"], run["seed"], run["gated"]): run["first"] for run in runs}
    chain = {(run["length"], run["seed"], run["gated"]): run["loss"]["chain"] for run in runs}
    assert first.keys() == {(*pair, gated) for pair in pairs for gated in (False, True)}
    mean = {key: sum(each["others"]) / 4 for key, each in first.items()}
    ratios = [mean[*pair, True] / mean[*pair, False] for pair in pairs]
    assert [round(ratio, 2) for ratio in ratios] == [0.88, 0.48, 0.88, 0.72, 0.37, 0.78, 0.34, 0.38, 0.52]
    for (length, _, gated), weight in mean.items():
        over = weight / sinks.equal_weight(length)
        assert over > 1.8 if length < 256 else over < 0.7 if gated else 1.05 < over < 1.7
    assert all(sum(each["triggers"]) / 4 < mean[key] for key, each in first.items())
    low = {
        gated: sum(w < sinks.equal_weight(64) for seed in sinks.SEEDS for w in first[64, seed, gated]["others"])
        for gated in (False, True)
    }
    assert low == {False: 0, True: 6}
    assert all(0 < chain[*pair, False] - chain[*pair, True] < 0.01 for pair in pairs)


@pytest.mark.parametrize("gated", [False, True])
def test_weights_of_the_page_are_those_of_its_results(sinks: ModuleType, gated: bool) -> None:
    length, seed = sinks.SAVED
    model = sinks.Transformer(sinks.SYMBOLS + 1, layers=1, gated=gated)
    model.load_state_dict(load_file(FOLDER / ("sinks-gated.safetensors" if gated else "sinks.safetensors")))
    test = sinks.texts(sinks.TESTED // length, length, torch.Generator().manual_seed(1000))
    runs = json.loads((FOLDER / "sinks.json").read_text(encoding="utf-8"))
    (run,) = [run for run in runs if (run["length"], run["seed"], run["gated"]) == (length, seed, gated)]
    for name, found in sinks.first_weights(model, test).items():
        torch.testing.assert_close(found, torch.tensor(run["first"][name]), atol=1e-3, rtol=0)
