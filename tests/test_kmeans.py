"""K-means of class vectors."""

import pytest
import torch

from manyclass import kmeans


def test_the_search_by_groups_finds_a_centroid_about_as_near(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(60, 8, generator=generator)
    rows = means.repeat(50, 1) + 0.3 * torch.randn(3000, 8, generator=generator)
    centroids = kmeans.fit_centroids(rows, 300)
    exact = kmeans.nearest_centroids(rows, centroids)
    monkeypatch.setattr(kmeans, "MAX_COMPARED_CENTROIDS", 100)
    found = kmeans.nearest_centroids(rows, centroids)

    def distance(label):
        return (rows - centroids[label]).square().sum(1)

    assert (found == exact).float().mean() > 0.9
    assert (distance(found) >= distance(exact) - 1e-5).all()
    assert distance(found).mean() < 1.1 * distance(exact).mean()


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compared", [100, 2048])
def test_autocast_does_not_change_the_clusters(compared, half, monkeypatch):
    monkeypatch.setattr(kmeans, "MAX_COMPARED_CENTROIDS", compared)
    rows = torch.randn(2000, 8, generator=torch.Generator().manual_seed(0))
    centroids = kmeans.fit_centroids(rows, 150)
    label = kmeans.nearest_centroids(rows, centroids)
    with torch.autocast("cpu", dtype=half):
        again = kmeans.fit_centroids(rows, 150)
        label_again = kmeans.nearest_centroids(rows, centroids)
    assert again.dtype == torch.float32
    assert torch.equal(again, centroids)
    assert torch.equal(label_again, label)


def test_clusters_that_are_made_in_inference_mode_can_be_used_in_training():
    rows = torch.randn(500, 8)
    with torch.inference_mode():
        centroids = kmeans.fit_centroids(rows, 20)
    assert not centroids.is_inference()


@pytest.mark.parametrize("value", [1e30, float("inf"), float("nan")])
def test_vectors_that_have_diverged_have_centroids_in_any_order(value):
    vectors = torch.randn(50, 3)
    vectors[::2] *= value
    assert kmeans.fit_centroids(vectors, 4).shape == (4, 3)
