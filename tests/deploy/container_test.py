#!/usr/bin/env python3
"""container_test.py BUILD_DIR: makes the OCI image of what was built and runs what deploy/kubernetes says with it.

Stands for a kubelet: it reads the manifests and runs their containers with runc, each in mount, pid, ipc, uts and
network namespaces of its own, with the volumes of the manifest and nothing else in common. A script stands for MPS
control, which NVIDIA's container runtime would bring along.
Exit status: 0 passed, 1 failed, 77 skipped because this machine can't do that.
"""
import contextlib
import json
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time

TESTS = pathlib.Path(__file__).resolve().parent.parent
DEPLOY = TESTS.parent / "deploy"
MOST_MIB = 60  # unpacked
MPS = """#!/bin/sh
if [ "$1" = -f ]; then
  : > "$CUDA_MPS_PIPE_DIRECTORY/control"
  exec sleep 1000
fi
read -r command && [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]
"""


def skip(why):
    print(f"skipped: {why}")
    sys.exit(77)


def check(holds, text):
    if not holds:
        raise AssertionError(text)


def run(*command, **options):
    return subprocess.run(command, check=True, text=True, timeout=600, **options)


def eventually(seconds, condition):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class Image:
    """The archive of deploy/container.sh, and its unpacked root."""

    def __init__(self, archive, work):
        layout = work / "layout"
        with tarfile.open(archive) as tar:
            tar.extractall(layout, filter="data")
        index = json.loads((layout / "index.json").read_text())
        check(len(index["manifests"]) == 1, f"index: {index}")
        manifest = self._blob(layout, index["manifests"][0])
        self.config = self._blob(layout, manifest["config"])
        self.tag = index["manifests"][0]["annotations"]["org.opencontainers.image.ref.name"]
        run("umoci", "unpack", "--image", f"{layout}:{self.tag}", str(work / "unpacked"))
        self.root = work / "unpacked" / "rootfs"
        self.runtime = json.loads((work / "unpacked" / "config.json").read_text())

    @staticmethod
    def _blob(layout, descriptor):
        algorithm, digest = descriptor["digest"].split(":")
        return json.loads((layout / "blobs" / algorithm / digest).read_text())


class Pod:
    """The containers of one pod specification, with its volumes below a directory."""

    def __init__(self, name, spec, image, volumes, work):
        self.name, self.spec, self.image, self.volumes = name, spec, image, volumes
        self.work = work / name
        self.work.mkdir()
        self.running = {}

    def _config(self, container):
        image = self.image.config["config"]
        config = json.loads(json.dumps(self.image.runtime))
        security = {**self.spec["securityContext"], **container["securityContext"]}
        check(security["capabilities"]["drop"] == ["ALL"] and security["readOnlyRootFilesystem"], str(security))
        kept = [f"CAP_{name}" for name in security["capabilities"].get("add", [])]
        check(security["runAsUser"] != 0 or not security["runAsNonRoot"], str(security))
        command = container.get("command", image["Entrypoint"])
        arguments = container.get("args", [] if "command" in container else image["Cmd"])
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        environment = {entry["name"]: entry["value"] for entry in container.get("env", [])}
        config["process"].update(
            terminal=False,
            args=command + arguments,
            env=image["Env"] + [f"{name}={value}" for name, value in environment.items()],
            user={"uid": security["runAsUser"], "gid": security["runAsGroup"]},
            capabilities={
                kind: kept for kind in ("bounding", "effective", "inheritable", "permitted", "ambient")
            },
            rlimits=[{"type": "RLIMIT_NOFILE", "hard": files, "soft": files}],
            noNewPrivileges=not security["allowPrivilegeEscalation"],
        )
        config["root"] = {"path": str(self.image.root), "readonly": True}
        mounted = [mount["mountPath"] for mount in container["volumeMounts"]]
        config["mounts"] = [mount for mount in config["mounts"] if mount["destination"] not in mounted]
        binds = [
            (self.volumes[mount["name"]], mount["mountPath"], mount.get("readOnly", False))
            for mount in container["volumeMounts"]
        ]
        binds.append((self.volumes["mps-control"], "/usr/bin/nvidia-cuda-mps-control", True))
        for source, destination, read_only in binds:
            config["mounts"].append(
                {
                    "destination": destination,
                    "type": "bind",
                    "source": str(source),
                    "options": ["rbind", "nosuid", "nodev"] + (["ro"] if read_only else ["rw"]),
                }
            )
        return config

    def _id(self, container):
        return f"epd-test-{os.getpid()}-{self.name}-{container['name']}"

    def start(self, container):
        bundle = self.work / container["name"]
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.mkdir()
        (bundle / "config.json").write_text(json.dumps(self._config(container)))
        with open(bundle / "log", "w") as log:
            process = subprocess.Popen(
                ["runc", "run", "--bundle", str(bundle), self._id(container)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )
        self.running[container["name"]] = process
        return process

    def log(self, container):
        return (self.work / container["name"] / "log").read_text()

    def execute(self, container, command):
        return subprocess.run(
            ["runc", "exec", self._id(container), *command],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60,
        )

    def wait(self, container, seconds=120):
        status = self.running[container["name"]].wait(seconds)
        del self.running[container["name"]]
        return status

    def must_end_well(self, container):
        status = self.wait(container)
        check(status == 0, f"{self._id(container)} ended with {status}:\n{self.log(container)}")

    def become_ready(self, container):
        probe = container["startupProbe"]
        limit = probe["failureThreshold"] * probe["periodSeconds"]
        ready = eventually(limit, lambda: self.execute(container, probe["exec"]["command"]).returncode == 0)
        check(ready, f"{self._id(container)} is not ready:\n{self.log(container)}")

    def begin(self):
        """Initial containers in order, as a kubelet would: each has ended well, or stays and is ready."""
        for container in self.spec["initContainers"]:
            self.start(container)
            if container.get("restartPolicy") != "Always":
                self.must_end_well(container)
            else:
                self.become_ready(container)

    def container(self, name):
        every = self.spec.get("initContainers", []) + self.spec["containers"]
        return next(container for container in every if container["name"] == name)

    def kill(self, container, signal):
        subprocess.run(["runc", "kill", self._id(container), signal], check=True, timeout=60)

    def stop(self, container):
        self.kill(container, "TERM")
        self.must_end_well(container)

    def remove(self):
        every = self.spec.get("initContainers", []) + self.spec["containers"]
        for container in every:
            subprocess.run(["runc", "delete", "--force", self._id(container)], capture_output=True, timeout=60)
        for process in self.running.values():
            process.kill()
            process.wait()


def answers(path):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


def serves(control, epctl):
    done = subprocess.run([epctl, "--socket", control, "--json", "status"], capture_output=True, text=True, timeout=60)
    return done.returncode == 0 and json.loads(done.stdout)["daemon"]["state"] == "serving"


def documents(path):
    import yaml

    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def make_volumes(work, names, owner):
    volumes = {}
    for name in names:
        volumes[name] = work / f"volume-{name}"
        volumes[name].mkdir()
        os.chown(volumes[name], owner, owner)
    volumes["mps-control"] = work / "mps-control"
    volumes["mps-control"].write_text(MPS)
    volumes["mps-control"].chmod(0o755)
    return volumes


def on_host_devices(pod, config):
    """Two host devices in place of GPUs; all else is the manifest's."""
    epd = pod.container("epd")
    epd["args"] = epd["args"] + ["--devices.host", "2"]
    shutil.copy(config, pod.volumes["config"])


def must_be_confined(pod, container):
    def says(command):
        return pod.execute(container, ["sh", "-c", command]).stdout.strip()

    user = pod.spec["securityContext"]["runAsUser"]
    check(says("id -u") == str(user), "it runs as " + says("id"))
    check(says(": 2>/dev/null >/file && echo written") == "", "its root is writable")
    check(int(says("grep CapEff /proc/1/status").split()[1], 16) == 0, says("grep Cap /proc/1/status"))


def test_image(image):
    config = image.config
    labels = config["config"]["Labels"]
    check(config["os"] == "linux" and config["architecture"] in ("amd64", "arm64"), str(config))
    check(config["config"]["User"] == "64990:64990", str(config["config"]))
    check(labels["org.opencontainers.image.version"].replace("+", "-") == image.tag, str(labels))
    check(labels["org.opencontainers.image.licenses"] == "Apache-2.0", str(labels))
    size = sum(file.lstat().st_size for file in image.root.rglob("*") if file.is_file() and not file.is_symlink())
    print(f"image: {size / 2**20:.0f} MiB unpacked (aim: {MOST_MIB})")
    check(size <= MOST_MIB << 20, f"the image has {size} bytes")


def test_sidecar(image, work, epctl):
    spec = documents(DEPLOY / "kubernetes/sidecar/pod.yaml")[0]["spec"]
    owner = spec["securityContext"]["fsGroup"]
    pod = Pod("sidecar", spec, image, make_volumes(work, [v["name"] for v in spec["volumes"]], owner), work)
    on_host_devices(pod, DEPLOY / "kubernetes/sidecar/epd.toml")
    epd, server = pod.container("epd"), pod.container("server")
    try:
        pod.begin()
        must_be_confined(pod, epd)
        pod.start(server)
        pod.must_end_well(server)
        print(pod.log(server).splitlines()[-1])
        pod.stop(epd)
        # Again, to see how long it takes; a container that comes back finds its old directory.
        begin = time.monotonic()
        pod.start(epd)
        check(eventually(30, lambda: answers(pod.volumes["epd"] / "epd.sock")), pod.log(epd))
        print(f"from runc's start to the first client's connection: {time.monotonic() - begin:.2f} s")
        check(eventually(30, lambda: serves(pod.volumes["epd"] / "control.sock", epctl)), pod.log(epd))
        print(f"from runc's start until both devices are served: {time.monotonic() - begin:.2f} s (aim: 0.5)")
        pod.start(server)
        pod.must_end_well(server)
        pod.stop(epd)
    finally:
        pod.remove()


def test_daemonset(image, work):
    spec = documents(DEPLOY / "kubernetes/daemonset/daemonset.yaml")[0]["spec"]["template"]["spec"]
    work = work / "node"
    work.mkdir()
    volumes = make_volumes(work, [volume["name"] for volume in spec["volumes"]], 0)
    volumes["shm"].chmod(0o1777)
    node = Pod("node", spec, image, volumes, work)
    on_host_devices(node, DEPLOY / "kubernetes/daemonset/epd.toml")
    epd = node.container("epd")
    client_spec = documents(DEPLOY / "kubernetes/daemonset/client.yaml")[0]["spec"]
    check({v["name"]: v["hostPath"]["path"] for v in client_spec["volumes"]}.items()
          <= {v["name"]: v.get("hostPath", {}).get("path") for v in spec["volumes"]}.items(),
          "the client mounts other directories than epd")
    client = Pod("client", client_spec, image, volumes, work)
    other_spec = json.loads(json.dumps(client_spec))
    other_spec["securityContext"].update(runAsUser=2000, runAsGroup=2000)
    other = Pod("other", other_spec, image, volumes, work)
    try:
        node.begin()
        node.start(epd)
        node.become_ready(epd)
        must_be_confined(node, epd)
        client.start(client.container("client"))
        client.must_end_well(client.container("client"))
        node.kill(epd, "KILL")  # its successor is found in the same directory
        check(node.wait(epd) != 0, "it ended well")
        node.start(epd)
        node.become_ready(epd)
        client.start(client.container("client"))
        client.must_end_well(client.container("client"))
        other.start(other.container("client"))
        status = other.wait(other.container("client"))
        check(status != 0, "a pod of another user is let in")
        check("permission denied" in other.log(other.container("client")).lower(), other.log(other.container("client")))
        node.stop(epd)
    finally:
        for pod in (client, other, node):
            pod.remove()


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    if os.geteuid() != 0:
        skip("only root can make the image")
    for tool in ("mmdebstrap", "umoci", "runc", "patchelf"):
        if shutil.which(tool) is None:
            skip(f"{tool} is not installed")
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix="epd-container-test-") as directory:
        work = pathlib.Path(directory)
        work.chmod(0o755)
        run(str(DEPLOY / "bundle.sh"), "--build-dir", str(build), "--output", str(work / "epd.tar.gz"))
        made = subprocess.run(
            [str(DEPLOY / "container.sh"), "--bundle", str(work / "epd.tar.gz"), "--output", str(work / "epd.oci.tar")],
            capture_output=True, text=True, timeout=600,
        )
        if "mmdebstrap could make no root" in made.stderr:
            print(made.stderr)
            skip("no Debian mirror")
        check(made.returncode == 0, made.stderr)
        image = Image(work / "epd.oci.tar", work)
        test_image(image)
        tried = subprocess.run(["runc", "--version"], capture_output=True, text=True)
        print(tried.stdout.splitlines()[0])
        test_sidecar(image, work, build / "bin/epctl")
        test_daemonset(image, work)


if __name__ == "__main__":
    try:
        main()
    except AssertionError as failure:
        print(f"FAILED: {failure}", file=sys.stderr)
        sys.exit(1)
