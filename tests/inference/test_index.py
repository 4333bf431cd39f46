"""An index reaches the wanted recall, and a saved one is checked when it is restored."""

import concurrent.futures
import json
import sys

import pytest
import torch

from manyclass import ClassHead, HierarchicalHead, ScorerHead
from manyclass.inference import Index, IndexState, _lists, estimate_log_z, top
from manyclass.samplers import Exhaustive
from tests.inference.model import C, D, trained

pytest.importorskip("faiss")

HEAD_OPTIONS = [(similarity, bias) for similarity in ("dot", "cosine") for bias in (True, False)]


@pytest.fixture(scope="module")
def built():
    head, hidden = trained()
    return head, hidden, Index.build(head, hidden[:200])


@pytest.mark.parametrize(("similarity", "bias"), HEAD_OPTIONS)
def test_the_wanted_recall_is_reached_on_new_queries(similarity, bias):
    head, hidden = trained(similarity=similarity, bias=bias, rows=600)
    index = Index.build(head, hidden[:300], recall=0.9)
    assert 0.85 <= index.recall(hidden[300:]) <= 1
    assert index.report.recall == pytest.approx(index.recall(hidden[300:]), abs=0.06)
    assert index.report.probes < index.report.lists / 3


@pytest.mark.parametrize(("similarity", "bias"), HEAD_OPTIONS)
def test_searching_all_lists_finds_the_exact_best(similarity, bias):
    head, hidden = trained(similarity=similarity, bias=bias)
    index = Index.build(head, hidden, recall=1.0, lists=3)
    exact = head.topk(hidden, 7).ids
    assert index.search(hidden, 7).tolist() == exact.tolist()
    assert index.recall(hidden, 7) == 1
    assert index.search(hidden, 4, exclude=exact[:, :3]).tolist() == exact[:, 3:].tolist()


def test_a_higher_recall_takes_more_lists():
    head, hidden = trained()
    reports = [Index.build(head, hidden, recall=recall).report for recall in (0.5, 0.9, 0.99)]
    assert reports[0].probes < reports[1].probes < reports[2].probes
    assert reports[0].recall < reports[1].recall < reports[2].recall


def test_the_report_shows_the_measurements(built):
    report = built[2].report
    lines = str(report).splitlines()
    assert lines[0] == f"recall@10           {report.recall:.1%} of the best classes found, 95.0% wanted"
    assert lines[1].startswith("queries per second  ")
    assert lines[2] == f"lists searched      {report.probes} of 216"
    assert lines[3].endswith("MiB for 3,000 × 16 class vectors")
    assert report.num_bytes == pytest.approx(C * (32 + 8), rel=0.3)


def test_excluded_classes_are_never_found(built):
    _, hidden, index = built
    first = index.search(hidden, 3)
    exclude = torch.cat([first, torch.full((len(hidden), 2), -1)], 1)
    found = index.search(hidden, 5, exclude=exclude)
    assert not (found.unsqueeze(2) == first.unsqueeze(1)).any()
    assert (found >= 0).all()
    assert all(len(set(row)) == 5 for row in found.tolist())


def test_too_few_classes_are_padded():
    head, hidden = trained(20, 4, k=5)
    index = Index.build(head, hidden)
    exclude = torch.arange(18).expand(3, -1)
    found = index.search(hidden[:3], 5, exclude=exclude)
    assert found[:, 2:].tolist() == [[-1] * 3] * 3
    assert found[:, :2].sort(1).values.tolist() == [[18, 19]] * 3


def test_more_classes_than_the_lists_hold_take_more_lists(built):
    _, hidden, index = built
    found = index.search(hidden[:4], C // 2)
    assert (found >= 0).all()
    assert index.search(hidden[:2], C).sort(1).values.tolist() == [list(range(C))] * 2


def test_any_shape_and_number_of_queries_is_accepted(built):
    _, hidden, index = built
    flat = index.search(hidden, 4)
    assert torch.equal(index.search(hidden.reshape(4, 100, D), 4).reshape(400, 4), flat)
    assert torch.equal(index.search(hidden[0], 4), flat[0])
    assert index.search(hidden[:0], 4).shape == (0, 4)
    many = hidden.repeat(4, 1)
    assert torch.equal(index.search(many, 4), flat.repeat(4, 1))


def test_a_query_of_nan_does_not_affect_the_others(built):
    _, hidden, index = built
    queries = hidden[:3].clone()
    queries[1] = torch.nan
    found = index.search(queries, 4)
    assert torch.equal(found[::2], index.search(hidden[:3], 4)[::2])
    assert ((found >= -1) & (found < C)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_indexed(dtype):
    head, hidden = trained(dtype=dtype)
    assert Index.build(head, hidden, recall=0.9).recall(hidden) > 0.85


def test_a_state_round_trips(built):
    head, hidden, index = built
    state = index.state()
    about = json.loads(json.dumps(state.about))
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    back = Index.from_state(IndexState(tensors, about), head)
    assert back.report == index.report
    assert torch.equal(back.search(hidden, 8), index.search(hidden, 8))
    assert {tensor.device.type for tensor in state.tensors.values()} == {"cpu"}


def with_tensor(name, change):
    def damage(state):
        return IndexState({**state.tensors, name: change(state.tensors[name].clone())}, state.about)

    return damage


def with_metadata(**about):
    return lambda state: IndexState(state.tensors, {**state.about, **about})


def setting(value, *position):
    def change(tensor):
        tensor[position] = value
        return tensor

    return change


DAMAGED = {
    "a newer format": (with_metadata(format=2), r"`state` must be an index of format 1, got 2"),
    "no format": (lambda state: IndexState({}, {}), r"`state` must be an index of format 1, got None"),
    "other sizes": (with_metadata(num_classes=7), r"`state` must be of the head's 3000 × 16 class vectors, got 7 × 16"),
    "another digest": (with_metadata(digest="0"), r"`state` must be of the head's weights, got an index of others"),
    "words for numbers": (
        with_metadata(probes="8"),
        r"`state` must have 'probes' as a number that is not negative, got '8'",
    ),
    "no lists searched": (with_metadata(probes=0), r"search 1 or more of them, got 216 and 0"),
    "too many lists": (with_metadata(lists=300), r"`state` must have the number of lists in its report, 300"),
    "no codes": (
        lambda state: IndexState({k: v for k, v in state.tensors.items() if k != "codes"}, state.about),
        r"`state` must have a tensor 'codes', got centroids, ids, range, sizes",
    ),
    "wide codes": (
        with_tensor("codes", lambda x: x.long()),
        r"`state` must have 'codes' as torch.uint8, got torch.int64",
    ),
    "short codes": (with_tensor("codes", lambda x: x[:-1]), r"`state\['codes'\]` must have shape \[3000, 32\]"),
    "a class twice": (
        with_tensor("ids", lambda x: setting(x[0], 1)(x)),
        r"`state\['ids'\]` must hold every class once",
    ),
    "a class too many": (with_tensor("ids", setting(C, 0)), r"`state\['ids'\]` must lie in \[0, 3000\), got 3000"),
    "sizes too small": (
        with_tensor("sizes", setting(0, 0)),
        r"`state\['sizes'\]` must be sizes of lists that sum to 3000",
    ),
    "sizes below 0": (
        with_tensor("sizes", setting(-5, 0)),
        r"`state\['sizes'\]` must be sizes of lists that sum to 3000",
    ),
    "centroids of NaN": (with_tensor("centroids", setting(torch.nan, 0, 0)), r"`state` must hold finite numbers"),
    "no range": (with_tensor("range", lambda x: x[:0]), r"`state\['range'\]` must have shape \[64\], got \[0\]"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused(built, name):
    head, _, index = built
    damage, message = DAMAGED[name]
    with pytest.raises(ValueError, match=message):
        Index.from_state(damage(index.state()), head)


@pytest.mark.parametrize("name", ["centroids", "range", "sizes", "ids", "codes"])
def test_flipped_bits_are_refused_or_do_no_harm(built, name):
    head, hidden, index = built
    state = index.state()
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        tensors = {key: value.clone() for key, value in state.tensors.items()}
        raw = tensors[name].view(torch.uint8).reshape(-1)
        place = torch.randint(len(raw), (20,), generator=generator)
        raw[place] ^= 1 << torch.randint(8, (20,), generator=generator).to(torch.uint8)
        try:
            back = Index.from_state(IndexState(tensors, state.about), head)
        except ValueError:
            continue
        found = back.search(hidden[:20], 5)
        assert ((found >= -1) & (found < C)).all()


def test_an_index_of_other_weights_is_refused(built):
    index = built[2]
    state = index.state()
    other, _ = trained()
    assert Index.from_state(state, other).report == index.report
    with torch.no_grad():
        other.bias[5] += 1e-3
    with pytest.raises(ValueError, match=r"must be of the head's weights, got an index of others: build it again"):
        Index.from_state(state, other)


def test_a_resized_head_needs_a_new_index():
    head, hidden = trained(50, 4, k=5)
    index = Index.build(head, hidden)
    head.resize(60, sampler=Exhaustive(60))
    with pytest.raises(ValueError, match=r"`index` must be of the head's 60 classes, got one of 50: build it again"):
        index.search(hidden, 3)


def test_scores_are_correct_after_the_weights_changed(built):
    head, hidden = trained()
    index = Index.build(head, hidden[:200], recall=1.0)
    with torch.no_grad():
        head.weight += 0.01 * torch.randn(C, D, generator=torch.Generator().manual_seed(1))
    scores, ids = index.nearest(hidden, 5)
    torch.testing.assert_close(scores, head.scores(hidden, ids).detach())
    assert index.recall(hidden, 5) > 0.95


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"`k` must be in \[1, 3000\], got 0"),
        ({"recall": 0.0}, r"`recall` must lie in \(0, 1\], got 0.0"),
        ({"recall": 1.5}, r"`recall` must lie in \(0, 1\], got 1.5"),
        ({"lists": 3001}, r"`lists` must be in \[1, 3000\], got 3001"),
        ({"hidden": torch.randn(1, D)}, r"`hidden` must hold at least 2 queries, got 1"),
        ({"hidden": torch.randn(5, 3)}, r"`hidden` must have shape \[..., 16\], got \[5, 3\]"),
        ({"hidden": torch.full((4, D), torch.nan)}, r"`hidden` must be finite, got nan at position \(0, 0\)"),
    ],
)
def test_invalid_build_options_are_refused(built, options, message):
    head, hidden, _ = built
    with pytest.raises(ValueError, match=message):
        Index.build(head, **{"hidden": hidden, **options})


def test_weights_must_be_finite():
    head, hidden = trained()
    with torch.no_grad():
        head.weight[7, 2] = torch.inf
    with pytest.raises(ValueError, match=r"`weight` must be finite, got inf at position \(7, 2\)"):
        Index.build(head, hidden)


def test_invalid_search_options_are_refused(built):
    _, hidden, index = built
    with pytest.raises(ValueError, match=r"`k` must be in \[1, 3000\], got 3001"):
        index.search(hidden, C + 1)
    with pytest.raises(ValueError, match=r"`exclude` must have shape \[400, 'E'\], got \[2, 1\]"):
        index.search(hidden, 2, exclude=torch.zeros(2, 1, dtype=torch.int64))


def test_few_classes_have_few_lists():
    head = ClassHead(4, 3)
    index = Index.build(head, torch.randn(6, 4), k=2)
    assert index.report.lists == 1
    assert index.recall(torch.randn(9, 4), 3) == 1


def test_without_faiss_the_error_names_the_package(monkeypatch):
    head, hidden = trained(50, 4, k=5)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"`Index` needs faiss: pip install 'manyclass\[ann\]'"):
        Index.build(head, hidden)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_head_on_a_gpu_is_indexed():
    head, hidden = trained()
    head, hidden = head.cuda(), hidden.cuda()
    index = Index.build(head, hidden, recall=0.9)
    assert index.search(hidden, 5).is_cuda
    assert index.recall(hidden) > 0.85
    assert Index.from_state(index.state(), head).recall(hidden) == pytest.approx(index.recall(hidden))


def test_outlier_classes_are_found(monkeypatch):
    """Frequent classes are few and far from the rest, so the range of the codes must include them."""
    monkeypatch.setattr(_lists, "CHUNK_CLASSES", 64)
    monkeypatch.setattr(_lists, "SAMPLED_ROWS_PER_LIST", 2)
    head, hidden = trained()
    with torch.no_grad():
        head.bias[2900:] += torch.linspace(10, 40, 100)
    index = Index.build(head, hidden, lists=20, recall=1.0)
    assert (head.topk(hidden, 10).ids >= 2900).double().mean() > 0.5
    assert index.recall(hidden) > 0.995


def test_threads_can_share_an_index(built):
    _, hidden, index = built
    queries = [(hidden[i : i + 8], 1 + i % 3) for i in range(0, 96, 8)]

    def search(query):
        return index.nearest(query[0], 5, probe_factor=query[1])[1].tolist()

    expected = [search(query) for query in queries]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(search, queries * 10)) == expected * 10


HEADS_WITHOUT_VECTORS = {
    "ScorerHead": lambda: ScorerHead(lambda hidden, ids: hidden @ torch.ones(*ids.shape, D).mT, Exhaustive(C)),
    "HierarchicalHead": lambda: HierarchicalHead(D, C),
}


@pytest.mark.parametrize("name", HEADS_WITHOUT_VECTORS)
def test_a_head_without_class_vectors_is_refused(name, built):
    head, hidden = HEADS_WITHOUT_VECTORS[name](), built[1]
    calls = (
        lambda: Index.build(head, hidden),
        lambda: Index.from_state(built[2].state(), head),
        lambda: top(head, hidden, 3),
        lambda: estimate_log_z(head, hidden),
    )
    for call in calls:
        with pytest.raises(TypeError, match=f"`head` must be a ClassHead, which has class vectors, got a {name}: use"):
            call()
