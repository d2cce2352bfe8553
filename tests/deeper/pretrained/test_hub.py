"""Names of the hub: a cache that is filled by hand, a hub on this machine, errors that help."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading
from urllib.parse import unquote, urlsplit

import pytest
import torch
import transformers
from family_checkpoints import make
from huggingface_hub.utils import filter_repo_objects
from tokenizer_folders import write

from minillm.deeper.pretrained.folder import FILES, local_place
from minillm.deeper.pretrained.load import from_pretrained

COMMITS = {"main": "a" * 40, "small": "b" * 40}
NOT_WANTED = ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth")
NOT_WANTED += ("flax_model.msgpack", "onnx/model.onnx", "tokenizer.model", "README.md")


def fill(folder):
    """A checkpoint with its tokenizer, and what real repositories hold besides."""
    model = make("llama-2", folder)
    config = (folder / "config.json").read_text()
    write(folder, "mistral-0.1")
    (folder / "config.json").write_text(config)
    for name in NOT_WANTED:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"nobody reads this")
    return model


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshot")
    return folder, fill(folder)


def run(code, **environment):
    """The output of `code`, run where the hub's settings are read afresh."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGINGFACE"))}
    inherited |= {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FIND = """
import json
from minillm.deeper.pretrained.folder import local_place
name = "org/tiny.llama-v0"
found = [str(local_place(name)), str(local_place(name, "small")), str(local_place(name))]
for name, revision in (("org/unknown", None), (name, "v9")):
    try:
        local_place(name, revision)
    except FileNotFoundError as error:
        found.append(str(error))
print(json.dumps(found))
"""
LOAD = """
from minillm import from_pretrained
model, tokenizer = from_pretrained("org/tiny.llama-v0", revision="small")
print(model.num_parameters(), tokenizer.encode("a cat"))
"""


@torch.no_grad()
def check(output, model, folder):
    """What `FIND` printed is right, if the branch "small" has half the head's weights."""
    whole, small, again, unknown, old = json.loads(output)
    assert whole == again
    ids = torch.tensor([[1, 5, 9]])
    expected = model(ids).logits
    for place, factor in ((whole, 1.0), (small, 0.5)):
        found, tokenizer = from_pretrained(place)
        torch.testing.assert_close(found(ids), factor * expected, atol=1e-5, rtol=1e-5)
        oracle = transformers.AutoTokenizer.from_pretrained(folder)
        assert tokenizer.encode("a cat") == oracle.encode("a cat")
    assert "no folder 'org/unknown', and not from the hub: org/unknown: " in unknown
    assert "tiny.llama-v0 at revision v9: " in old


def branches(folder, root):
    """Two versions of the folder: as it is, and with half of the head's weights."""
    from shutil import copytree

    from safetensors.torch import load_file, save_file

    for commit in COMMITS.values():
        copytree(folder, root / commit)
    path = root / COMMITS["small"] / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] / 2
    save_file(tensors, path, metadata={"format": "pt"})
    return root


def test_a_name_is_found_in_the_local_cache_without_a_network(snapshot, tmp_path):
    folder, model = snapshot
    repository = tmp_path / "models--org--tiny.llama-v0"
    branches(folder, repository / "snapshots")
    (repository / "refs").mkdir()
    for branch, commit in COMMITS.items():
        (repository / "refs" / branch).write_text(commit)
    offline = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    output = run(FIND, **offline)
    check(output, model, folder)
    assert all("outgoing traffic has been disabled" in error for error in json.loads(output)[3:])
    ids = transformers.AutoTokenizer.from_pretrained(folder).encode("a cat")
    assert run(LOAD, **offline) == f"{model.num_parameters()} {ids}\n"


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of huggingface.co as a download asks for; what was asked for is in `asked`."""

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        name, root = "org/tiny.llama-v0", self.server.root
        commits = {**COMMITS, **{c: c for c in COMMITS.values()}}
        if path.startswith(f"/api/models/{name}"):
            parts = path.removeprefix(f"/api/models/{name}").split("/")
            commit = commits.get(parts[2] if len(parts) > 2 else "main")
            if commit is None:
                return self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = [f for f in sorted((root / commit).rglob("*")) if f.is_file()]
            files = {str(f.relative_to(root / commit)): f.read_bytes() for f in files}
            if "tree" in parts:
                tree = [
                    {"type": "file", "path": p, "size": len(d), "oid": hashlib.sha1(d).hexdigest()}
                    for p, d in files.items()
                ]
                return self.answer(200, json.dumps(tree).encode())
            siblings = [{"rfilename": p} for p in files]
            info = {"id": name, "modelId": name, "sha": commit, "siblings": siblings}
            return self.answer(200, json.dumps(info).encode())
        if path.startswith(f"/{name}/resolve/"):
            commit, file = path.removeprefix(f"/{name}/resolve/").split("/", 1)
            self.server.asked.add(file)
            data = (root / commits[commit] / file).read_bytes()
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.answer(200, data, {"X-Repo-Commit": commits[commit], "ETag": etag})
        return self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    do_HEAD = do_GET

    def answer(self, status, data, headers=()):
        self.send_response(status)
        for key, value in {**dict(headers), "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *args):
        pass


def test_a_name_is_fetched_from_a_hub_and_only_what_is_needed(snapshot, tmp_path):
    folder, model = snapshot
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.root, server.asked = branches(folder, tmp_path / "hub"), set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    options = {"HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_DISABLE_XET": "1"}
    try:
        output = run(FIND, HF_ENDPOINT=address, **options)
    finally:
        server.shutdown()
        server.server_close()
    check(output, model, folder)
    wanted = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert server.asked == {*wanted, "generation_config.json"}
    assert "RepositoryNotFoundError" in json.loads(output)[3]
    assert "RevisionNotFoundError" in json.loads(output)[4]


def test_which_files_of_known_repositories_are_asked_for():
    def wanted(*names):
        return set(filter_repo_objects(names, allow_patterns=FILES))

    assert not wanted(
        *NOT_WANTED, "pytorch_model-00001-of-00002.bin", "tf_model.h5", "rust_model.ot"
    )
    assert not wanted("pytorch_model.bin.index.json", "consolidated.00.pth", "params.json")
    assert not wanted(
        "training_args.bin", "onnx/model.safetensors", "modeling_x.py", "optimizer.pt"
    )
    shards = {f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)}
    used = {*shards, "model.safetensors", "model.safetensors.index.json", "config.json"}
    used |= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    assert wanted(*used, *NOT_WANTED) == used


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./here", "../there", "a/b/c", "", ".", "C:\\models", "~/model"]
)
def test_what_can_be_no_name_is_not_asked_for(name, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    if name in ("", "."):  # the folder itself, which is empty
        with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
            from_pretrained(name)
        return
    with pytest.raises(FileNotFoundError, match=r"no folder .* no name 'owner/model' of the hub"):
        from_pretrained(name)


def test_names_go_to_the_hub_as_they_are(monkeypatch, tmp_path):
    asked = []

    def download(name, **options):
        asked.append((name, options["revision"]))
        return str(tmp_path)

    (tmp_path / "model.safetensors").touch()
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    for name in ("gpt2", "Qwen/Qwen2.5-0.5B-Instruct", "meta-llama/Llama-3.1-8B", "a_b/c.d-e_f"):
        assert local_place(name, "x") == tmp_path
        assert asked.pop() == (name, "x")
    assert local_place(tmp_path, "x") == tmp_path and not asked


def test_a_repository_of_gguf_files(monkeypatch, tmp_path):
    """The only one is fetched; of several, none."""
    held, fetched = ["README.md", "small.Q4_0.gguf"], []

    def fetch(name, file, *, revision):
        fetched.append((name, file, revision))
        return str(tmp_path / file)

    hub = "huggingface_hub."
    monkeypatch.setattr(hub + "snapshot_download", lambda *_, **__: str(tmp_path / "nothing"))
    monkeypatch.setattr(hub + "list_repo_files", lambda *_, **__: held)
    monkeypatch.setattr(hub + "hf_hub_download", fetch)
    assert local_place("org/name", "x") == tmp_path / "small.Q4_0.gguf"
    assert fetched == [("org/name", "small.Q4_0.gguf", "x")]
    held += ["small.Q8_0.gguf"]
    several = r"org/name holds several.*hf_hub_download\('org/name', FILE\).*: .*Q4_0.gguf, .*Q8_0"
    with pytest.raises(ValueError, match=several):
        local_place("org/name")
    held[:] = ["pytorch_model.bin"]
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        from_pretrained("org/name")
    assert len(fetched) == 1


def test_no_folder_and_no_library(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(
        FileNotFoundError, match=r"no folder 'org/name'.*pip install huggingface_hub"
    ):
        from_pretrained("org/name")
    with pytest.raises(FileNotFoundError, match=r"no folder"):
        from_pretrained(tmp_path / "nowhere")
