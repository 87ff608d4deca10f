#!/usr/bin/env python3
"""kubernetes_test.py BUILD_DIR: judges the manifests of deploy/kubernetes by Kubernetes' own schemas.

The schemas come with kubernetes-validate, from PyPI once, into BUILD_DIR. Kustomizations are rendered with kubectl,
where it is installed. Exit status: 0 passed, 1 failed, 77 skipped because the validator can't be had.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import venv

import yaml

VALIDATOR = "kubernetes-validate==1.37.0"
VERSIONS = ("1.29", "1.32", "1.37")  # the oldest with native sidecars, one between, the newest known
ROOT = pathlib.Path(__file__).resolve().parents[2]
MANIFESTS = ROOT / "deploy/kubernetes"


def fail(text):
    print(f"FAILED: {text}", file=sys.stderr)
    sys.exit(1)


def validator(build):
    """The program, or None."""
    home = build / "deploy/kubernetes-validate"
    program = home / "bin/kubernetes-validate"
    stamp = home / VALIDATOR
    if not stamp.exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        done = subprocess.run([home / "bin/pip", "install", "--quiet", "--disable-pip-version-check", VALIDATOR],
                              capture_output=True, text=True, timeout=240)
        if done.returncode != 0:
            print(done.stderr)
            return None
        stamp.touch()
    return program


def judge(program, version, text):
    return subprocess.run([program, "--strict", "-k", version, "-"], input=text, capture_output=True, text=True, timeout=120)


def without_custom_resources(name, text):
    """Keeps the documents for which Kubernetes itself has schemas."""
    kept = []
    for document in yaml.safe_load_all(text):
        if document["apiVersion"].startswith("monitoring.coreos.com/"):
            print(f"{name}: no schema for {document['kind']}; not judged")
        else:
            kept.append(document)
    return yaml.safe_dump_all(kept)


def must_be_valid(program, name, text):
    text = without_custom_resources(name, text)
    if not text:
        return
    for version in VERSIONS:
        done = judge(program, version, text)
        if done.returncode != 0:
            fail(f"{name}, Kubernetes {version}: {done.stdout}{done.stderr}")
    print(f"{name}: valid for Kubernetes {', '.join(VERSIONS)}")


def pods_of(documents):
    for document in documents:
        if document["kind"] == "Pod":
            yield document["spec"]
        elif document["kind"] == "DaemonSet":
            yield document["spec"]["template"]["spec"]


def must_hold_together(name, text):
    """Checks references that a patch can break and no schema sees: mounts have volumes, and volumes their ConfigMaps."""
    documents = list(yaml.safe_load_all(text))
    maps = {document["metadata"]["name"] for document in documents if document["kind"] == "ConfigMap"}
    pods = list(pods_of(documents))
    if not pods:
        fail(f"{name} has no pod")
    for pod in pods:
        volumes = {volume["name"] for volume in pod["volumes"]}
        named = {volume["configMap"]["name"] for volume in pod["volumes"] if "configMap" in volume}
        if not named <= maps:
            fail(f"{name}: no ConfigMap {named - maps}")
        containers = pod.get("initContainers", []) + pod["containers"]
        mounted = {mount["name"] for container in containers for mount in container["volumeMounts"]}
        if mounted != volumes:
            fail(f"{name}: volumes {volumes}, mounted {mounted}")
        order = [container["name"] for container in containers]
        if order != [each for each in ("directories", "mps", "epd", "server") if each in order]:
            fail(f"{name}: containers begin in the order {order}")


def must_take_a_site(folder, version):
    """As the README says: a registry, a namespace and a prefix of one's own."""
    with tempfile.TemporaryDirectory(prefix="epd-kubernetes-test-") as directory:
        shutil.copytree(MANIFESTS, pathlib.Path(directory) / "epd")
        (pathlib.Path(directory) / "kustomization.yaml").write_text(
            f"""apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
namespace: ml
namePrefix: site-
resources: [epd/{folder.relative_to(MANIFESTS)}]
images: [{{name: epd, newName: registry.example/epd}}]
""")
        text = render(pathlib.Path(directory))
    if f"image: epd:{version}" in text or f"image: registry.example/epd:{version}" not in text:
        fail(f"{folder.relative_to(ROOT)}: images of a site: {re.findall('image: .*', text)}")
    for document in yaml.safe_load_all(text):
        if document["metadata"].get("namespace", "ml") != "ml":
            fail(f"{folder.relative_to(ROOT)}: {document['kind']} is in {document['metadata']['namespace']}")
    return text


def render(folder):
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        fail(f"{folder}: {done.stderr}")
    return done.stdout


def kustomizations():
    return sorted(path.parent for path in MANIFESTS.rglob("kustomization.yaml"))


def plain_manifests():
    return sorted(path for path in MANIFESTS.rglob("*.yaml") if path.name != "kustomization.yaml")


def main():
    program = validator(pathlib.Path(sys.argv[1]).resolve())
    if program is None:
        print(f"skipped: {VALIDATOR} can't be had from PyPI (above)")
        sys.exit(77)
    version = re.search(r"project\(\s*epd\s+VERSION\s+([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    for manifest in plain_manifests():
        text = manifest.read_text()
        must_be_valid(program, manifest.relative_to(ROOT), text)
        for image in re.findall(r"image: (\S+)", text):
            if image != f"epd:{version}":
                fail(f"{manifest.relative_to(ROOT)} names {image}; this is epd:{version}")
    # A judge that accepts everything is none.
    wrong = (MANIFESTS / "sidecar/pod.yaml").read_text().replace("restartPolicy: Always", "restartPolcy: Always", 1)
    if judge(program, VERSIONS[0], wrong).returncode == 0:
        fail("the validator accepts a field that does not exist")
    if shutil.which("kubectl") is None:
        print("not tested: the kustomizations; kubectl is not installed")
        return
    for folder in kustomizations():
        rendered = render(folder)
        must_be_valid(program, folder.relative_to(ROOT), rendered)
        for text in (rendered, must_take_a_site(folder, version)):
            must_hold_together(folder.relative_to(ROOT), text)
        if folder.name.endswith("-host"):
            for word in ("runtimeClassName", "nvidia-cuda-mps-control", "nvidia.com/gpu:", "nvidia.com/gpu.present"):
                if word in rendered:
                    fail(f"{folder.relative_to(ROOT)} is for machines without GPUs, and says {word}")


main()
