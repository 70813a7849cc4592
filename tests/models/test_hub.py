"""Models of the Hub without a network: a stand-in for the download, or the cache."""

import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import errors

from logra_jax.models.hub import fetch_model, is_hub_name
from logra_jax.models.sources import find_model

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """What is asked of the Hub; it has one model, which is in a local directory."""
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append({"repo": repo_id, **options})
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    (tmp_path / "config.json").write_text("{}")
    return asked


def kept(asked: dict, files: list[str]) -> list[str]:
    """The files that the Hub would send, by its own rule."""
    return list(
        huggingface_hub.utils.filter_repo_objects(
            files,
            allow_patterns=asked["allow_patterns"],
            ignore_patterns=asked["ignore_patterns"],
        )
    )


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("Qwen/Qwen2.5-0.5B", True),
        ("Qwen/Qwen2.5-0.5B@main", True),
        ("a_b/c.d-e@refs/pr/1", True),
        ("gpt2", False),
        ("./model", False),
        ("../model", False),
        ("~/model", False),
        ("/model", False),
        ("runs/mine/model", False),
        ("owner/name@", False),
        ("owner/", False),
        ("owner/file.gguf", False),
        ("owner/na me", False),
        ("öwner/name", False),
    ],
)
def test_a_name_of_the_hub_has_an_owner(name, is_one):
    assert is_hub_name(name) == is_one


def test_weights_tokenizer_and_licence_are_fetched_and_nothing_else(
    downloads, tmp_path
):
    (tmp_path / "model.safetensors").touch()
    assert fetch_model("Qwen/Qwen2.5-0.5B@v1") == tmp_path
    [asked] = downloads
    assert (asked["repo"], asked["revision"]) == ("Qwen/Qwen2.5-0.5B", "v1")
    needed = [
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "LICENSE",
        "README.md",
    ]
    others = [
        "pytorch_model.bin",
        "model.gguf",
        "onnx/config.json",
        "original/consolidated.00.safetensors",
        "consolidated.safetensors",
        "tf_model.h5",
    ]
    assert kept(asked, needed + others) == needed


def test_shapes_need_config_json_alone(downloads, tmp_path):
    assert fetch_model("Qwen/Qwen2.5-0.5B", shapes_only=True) == tmp_path
    [asked] = downloads
    assert asked["revision"] is None
    assert kept(asked, ["config.json", "model.safetensors", "README.md"]) == [
        "config.json"
    ]


def test_a_directory_here_comes_before_one_there(downloads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_model("owner/name", tmp_path) == Path("owner/name")
    assert downloads == []
    find_model("owner/other", tmp_path, shapes_only=True)
    assert len(downloads) == 1


def test_a_model_without_safetensors_is_refused(downloads):
    with pytest.raises(ValueError, match=r"with model\.safetensors or .*'owner/name'"):
        fetch_model("owner/name")


def http_error(kind: type[Exception]) -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, "404 Client Error\n\nhttps://huggingface.co/api/...")
    return error


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (http_error(errors.RepositoryNotFoundError), "not on the Hub, nor a directory"),
        (http_error(errors.GatedRepoError), "asks for permission; .*hf auth login"),
        (http_error(errors.RevisionNotFoundError), "no such revision"),
        (errors.LocalEntryNotFoundError("no"), "not in the cache, .*HF_HUB_OFFLINE"),
        (http_error(errors.HfHubHTTPError), "not be downloaded: 404 Client Error; try"),
        (OSError(28, "No space left on device"), "No space left on device; try"),
    ],
)
def test_what_goes_wrong_is_one_sentence(monkeypatch, error, sentence):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=f"got 'owner/name', .*{sentence}") as caught:
        fetch_model("owner/name")
    assert "\n" not in str(caught.value)


def test_offline_the_cache_is_all_there_is(tmp_path):
    """The real download, with a cache as an earlier download leaves it."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / REVISION
    for folder in (snapshot, repository / "refs", repository / "blobs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text(REVISION)
    for file in ("config.json", "model.safetensors"):
        (repository / "blobs" / file).write_text("{}")
        (snapshot / file).symlink_to(Path("../../blobs") / file)
    code = """
from logra_jax.models.hub import fetch_model
for name in ("owner/name", "owner/name@main", "owner/lost", "owner/name@lost"):
    try:
        print(fetch_model(name))
    except ValueError as error:
        print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    found, again, lost, no_revision = done.stdout.splitlines()
    assert found == again == str(snapshot)
    for line, name in ((lost, "owner/lost"), (no_revision, "owner/name@lost")):
        assert f"got '{name}', which is not in the cache, and the Hub" in line


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "a/b/nowhere", "no where"])
def test_a_name_of_nothing_is_one_sentence(tmp_path, name):
    with pytest.raises(ValueError, match=r"`model.path` must be .* which is none of"):
        find_model(name, tmp_path)
