#!/usr/bin/env python3
"""Runs the templates of deploy/ for Kubernetes without a cluster: pods are namespaces of this machine, and what the MPI operator and JobSet
add to them is added here.

    cargo build --release --example gpt_train
    sudo scripts/kubernetes.py

- deploy/mpijob.yaml and deploy/jobset.yaml, with their own commands, volumes and users: mpirun reaches the workers by ssh. A rank is killed,
  the launcher fails and is started again, and the losses are those of an uninterrupted run of threads, bit by bit.
- deploy/jobset-gpus.yaml on emulated cards, of which each pod has two: elements go between pods over emulated NCCL. A process is killed, the
  other pod's says which, and the set that is started again has the losses of threads.
- A pod whose command forgets mpirun, as an indexed Job and in the launcher of an MPIJob: refused, with the line to use.

A pod has a network, a host name and files of its own: packages and commands of deploy/Dockerfile over the /usr and /etc of this machine, which
keeps what it has. Needs Debian 12, as the image has, Linux, root, iproute2, apt-get and PyYAML. Where one of them is missing or not permitted
it says so and ends with code 0.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from two_hosts import MODEL, ROOT, Losses, ip, kill_all, processes, skipped, unpacked

STEPS, EVERY = 300, 10  # steps of a run, and between its checkpoints
EMULATED = 30  # steps on emulated cards, which take longer
LONGEST = 90  # seconds of a run
SWITCH = f"mw{os.getpid()}"  # the namespace of the bridge between pods
USER = 1000  # of the image
SEARCH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# The files of a pod: root, image and name of the pod, pairs of a folder and where it is mounted, --, the command.
ROOM = """
set -e
root=$1 image=$2
hostname "$3"
shift 3
mount -t tmpfs tmpfs "$root"
cd "$root"
mkdir -p usr etc proc dev sys run/sshd home tmp var root
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
mount -t overlay overlay -o "lowerdir=$image/usr:/usr" usr
cp -a /etc/. "$image/etc/." etc
for name in proc dev sys; do mount --rbind /$name $name; done
mount -t tmpfs tmpfs dev/shm
cp -a "$image/home/." home
chmod 1777 tmp dev/shm
while [ "$1" != -- ]; do
    mkdir -p "$root$2"
    mount --bind "$1" "$root$2"
    shift 2
done
shift
groups=$1
shift
exec chroot --userspec=1000:1000 --groups="$groups" "$root" "$@"
"""


def image(programs, folder):
    """What the image has beside Debian's files: packages, the program, and what the commands of deploy/Dockerfile write."""
    last = (ROOT / "deploy/Dockerfile").read_text().split("\nFROM ")[-1].replace("\\\n", "")
    commands = re.findall(r"^RUN (.*)", last, re.MULTILINE)
    packages = re.search(r"apt-get install(?: --\S+)* (.*?) &&", commands[0])[1].split()
    layer = folder / "image"
    files = unpacked("image", packages)
    shutil.copytree(files, layer, symlinks=True)
    if (files / "lib").exists():
        shutil.copytree(files / "lib", layer / "usr/lib", symlinks=True, dirs_exist_ok=True)
    (layer / "usr/bin/mpirun").symlink_to("mpirun.openmpi")  # by Debian's alternatives
    for name in ("usr/local/bin", "home", "etc"):
        (layer / name).mkdir(parents=True, exist_ok=True)
    shutil.copy2(programs / "gpt_train", layer / "usr/local/bin/gpt_train")
    for name in ("passwd", "group", "shadow", "gshadow", "subuid", "subgid"):  # those of an image have no user beside the system's
        kept = [line for line in Path("/etc", name).read_text().splitlines() if not re.search(r":[1-5]\d{3}:", line)]
        (layer / "etc" / name).write_text("\n".join(kept) + "\n")
        shutil.copymode(Path("/etc", name), layer / "etc" / name)
    inside = (
        f'for name in usr etc; do mkdir $1/$name; mount -t overlay overlay -o "lowerdir=/$name,upperdir={layer}/$name,workdir=$1/$name" /$name; done'
        f' && mount --bind {layer}/home /home && sh -c "$2"'
    )
    for command in commands:
        parts = [part for part in command.split("&&") if not re.search(r"apt-get|/var/|/run/", part)]
        with tempfile.TemporaryDirectory(dir=folder) as room:
            subprocess.run(["unshare", "--mount", "sh", "-c", inside, "sh", room, "&&".join(parts) or "true"], check=True)
    return layer


class Pods:
    """The pods of one object."""

    def __init__(self, folder, layer, losses, name):
        self.folder, self.layer, self.losses, self.name = folder, layer, losses, name
        self.spaces, self.hosts = [], "127.0.0.1 localhost\n"
        ip("netns", "add", SWITCH)
        ip("-n", SWITCH, "link", "add", "bridge", "type", "bridge")
        ip("-n", SWITCH, "link", "set", "bridge", "up")

    def remove(self):
        kill_all(self.spaces)
        for space in [*self.spaces, SWITCH]:
            ip("netns", "del", space, check=False)

    def add(self, *names):
        """A pod with these names, the first of which its host has."""
        number = len(self.spaces) + 1
        space = f"{SWITCH}p{number}"
        ip("netns", "add", space)
        ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", f"p{number}", "netns", SWITCH)
        ip("-n", SWITCH, "link", "set", f"p{number}", "master", "bridge", "up")
        for end in ("lo", "eth0"):
            ip("-n", space, "link", "set", end, "up")
        ip("-n", space, "addr", "add", f"10.78.0.{number}/24", "dev", "eth0")
        self.spaces.append(space)
        self.hosts += f"10.78.0.{number} {' '.join([*names[1:], names[0]])}\n"
        return space, names[0]

    def volume(self, pod, volume, group):
        """The folder of a volume, with the owners and modes that a kubelet gives it."""
        if "emptyDir" in volume:
            at = Path(tempfile.mkdtemp(dir=self.folder))
            os.chmod(at, 0o1777)
            return at
        claim = volume.get("persistentVolumeClaim")
        at = self.folder / f"{self.name}-{claim['claimName']}" if claim else Path(tempfile.mkdtemp(dir=self.folder))
        if claim:
            at.mkdir(exist_ok=True)
            mode = 0o755
        else:
            files = self.files[volume["secret"]["secretName"]]
            mode = volume["secret"].get("defaultMode", 0o644)
            for name, content in files.items():
                (at / name).write_text(content)
                os.chmod(at / name, mode | (0o440 if group else 0))
                os.chown(at / name, 0, group or 0)
            mode = 0o755
        os.chown(at, 0, group or 0)
        os.chmod(at, mode | (0o2070 if group else 0))
        return at

    def start(self, pod, spec, variables=(), more=(), command=None):
        """Starts the container of a pod; `more` are pairs of a folder and where it is mounted."""
        space, name = pod
        container, group = spec["containers"][0], spec.get("securityContext", {}).get("fsGroup")
        volumes = {volume["name"]: volume for volume in spec.get("volumes", [])}
        mounts = [(self.volume(pod, volumes[of["name"]], group), of["mountPath"]) for of in container.get("volumeMounts", [])]
        hosts = Path(tempfile.mkdtemp(dir=self.folder))
        root = Path(tempfile.mkdtemp(dir=self.folder))
        (hosts / "hosts").write_text(self.hosts)
        command = command or [*container["command"], *container["args"]]
        variables = [SEARCH, "HOME=/home/mpiuser", f"HOSTNAME={name}", "TERM=dumb", *variables]
        variables += [f"{of['name']}={of['value']}" for of in container.get("env", []) if "value" in of]
        script = ROOM.replace("while [", f'mount --bind "{hosts}/hosts" etc/hosts\nwhile [', 1)
        line = ["ip", "netns", "exec", space, "unshare", "--uts", "--mount", "bash", "-c", script, "bash", root, self.layer, name]
        line += [word for pair in [*mounts, *more] for word in pair]
        line += ["--", group or USER, "env", "-i", "--chdir=/home/mpiuser", *variables, *command]
        output = open(self.folder / f"{name}.log", "a+")
        return subprocess.Popen([str(word) for word in line], stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def text(self, pod):
        return (self.folder / f"{pod[1]}.log").read_text()[-4000:]


def keys(folder, kind):
    """The files of a secret for ssh."""
    at = Path(tempfile.mkdtemp(dir=folder)) / "id_rsa"
    subprocess.run(["ssh-keygen", "-q", "-t", kind, "-m", "PEM", "-N", "", "-f", at], check=True)
    public = at.with_suffix(".pub").read_text()
    return {"id_rsa": at.read_text(), "id_rsa.pub": public, "authorized_keys": public}


def job_set(pods, found):
    """Launcher and workers of a JobSet: their pods, what their containers get, and whether a failure starts all of them anew."""
    name = found["metadata"]["name"]
    pods.files = {"meshwork-ssh": keys(pods.folder, "rsa")}
    made = {}
    for job in found["spec"]["replicatedJobs"]:
        spec = job["template"]["spec"]
        of_job = []
        for index in range(spec["completions"]):
            host = f"{name}-{job['name']}-0-{index}"
            of_job.append((pods.add(host, f"{host}.{name}"), spec["template"]["spec"], [f"JOB_COMPLETION_INDEX={index}"], []))
        made[job["name"]] = of_job
    return made["launcher"][0], made["workers"], True


def mpi_job(pods, found):
    """The same of an MPIJob."""
    name, spec = found["metadata"]["name"], found["spec"]
    secret = keys(pods.folder, "ecdsa")
    pods.files = {"ssh": secret}
    replicas, service = spec["mpiReplicaSpecs"], f"{name}-worker"
    hosts = [f"{service}-{index}.{service}.default.svc" for index in range(replicas["Worker"]["replicas"])]
    config = Path(tempfile.mkdtemp(dir=pods.folder))
    os.chmod(config, 0o755)
    (config / "hostfile").write_text("".join(f"{host} slots={spec['slotsPerWorker']}\n" for host in hosts))

    def with_ssh(pod):
        """What the operator adds: the files of ssh in a secret."""
        of = pod["template"]["spec"]
        container = of["containers"][0]
        volumes = [*of.get("volumes", []), {"name": "ssh-auth", "secret": {"secretName": "ssh"}}]
        mounts = [*container.get("volumeMounts", []), {"name": "ssh-auth", "mountPath": spec["sshAuthMountPath"]}]
        return of | {"volumes": volumes, "containers": [container | {"volumeMounts": mounts}]}

    variables = ["K_MPI_JOB_ROLE=launcher", "OMPI_MCA_orte_keep_fqdn_hostnames=true", "OMPI_MCA_orte_default_hostfile=/etc/mpi/hostfile"]
    variables += ["OMPI_MCA_plm_rsh_args=-o ConnectionAttempts=10", f"OMPI_MCA_orte_set_default_slots={spec['slotsPerWorker']}"]
    launcher = pods.add(f"{name}-launcher")
    workers = [(pods.add(host.split(".")[0], host), with_ssh(replicas["Worker"]), ["K_MPI_JOB_ROLE=worker"], []) for host in hosts]
    return (launcher, with_ssh(replicas["Launcher"]), variables, [(config, "/etc/mpi")]), workers, False


def trains(pods, found, make, wanted):
    launcher, workers, all_anew = make(pods, found)
    sets = [*MODEL.split(), f"training.steps={STEPS}", f"checkpoint.every={EVERY}", "comm.timeout_seconds=10"]
    words = [word for one in sets for word in ("--set", one)]
    metrics = pods.folder / f"{pods.name}-runs/metrics.jsonl"
    container = launcher[1]["containers"][0]
    command = [*container["command"], *container["args"], *words]

    def run(until):
        """Starts the launcher, and kills a rank after so many steps. Its exit code."""
        running = pods.start(*launcher, command=command)
        begun, first = time.monotonic(), len(pods.losses.of(metrics))
        while running.poll() is None:
            if until and len(pods.losses.of(metrics)) >= first + until:
                os.kill(int(processes("gpt_train", pods.spaces)[-1]), signal.SIGKILL)
                until = None
            if time.monotonic() - begun > LONGEST:
                sys.exit(f"{pods.name}: the launcher does not end\n{pods.text(launcher[0])}\n{pods.text(workers[0][0])}")
            time.sleep(0.02)
        return running.returncode

    for worker in workers:
        pods.start(*worker)
    time.sleep(1)  # the operator and JobSet do not wait for sshd either: ssh tries again
    first = run(25)
    come = len(pods.losses.of(metrics))
    if first == 0 or not 25 <= come < STEPS:
        sys.exit(f"{pods.name}: ended with {first} after {come} steps\n{pods.text(launcher[0])}\n{pods.text(workers[0][0])}")
    if left := processes("gpt_train", pods.spaces):
        sys.exit(f"{pods.name}: processes {left} are left")
    if all_anew:
        kill_all(pods.spaces)
        for worker in workers:
            pods.start(*worker)
        time.sleep(1)
    second = run(None)
    if second or "4 processes on 2 hosts by Open MPI's mpirun" not in pods.text(launcher[0]):
        sys.exit(f"{pods.name}: started again, ended with {second}\n{pods.text(launcher[0])}")
    if pods.losses.of(metrics) != wanted:
        sys.exit(f"{pods.name}: other losses than those of threads")
    print(f"{pods.name}: 4 processes in 2 pods; a rank is killed after {come} steps, the launcher ends with {first}, and started again it has")
    print(f"    the losses of an uninterrupted run of threads in all {STEPS} steps")

    # The program itself, in a pod that was to run mpirun, and in one of a Job.
    line = ["gpt_train", *command[command.index("gpt_train") + 1 :]]
    for pod in (launcher, workers[0]):
        if all(not variable.endswith("=worker") for variable in pod[2]):
            before = len(pods.text(pod[0]))
            code, told = pods.start(*pod, command=line).wait(LONGEST), pods.text(pod[0])
            said = next((line for line in told.splitlines()[::-1] if "mpirun" in line), told[before:])
            if code != 2 or "mpirun" not in said:
                sys.exit(f"{pods.name}: without mpirun it ended with {code}: {told}")
            print(f"{pods.name}, {pod[0][1]} without mpirun: refused: {said.strip()[:200]}")


def trains_on_cards(pods, found, wanted):
    """The processes of a JobSet without mpirun, one in each pod."""
    name, [job] = found["metadata"]["name"], found["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    of_pod, index = spec["template"]["spec"], "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = of_pod["containers"][0]
    numbered = [of["name"] for of in container["env"] if of.get("valueFrom") == {"fieldRef": {"fieldPath": index}}]
    cards = {"cuda": "cuda-emulated:0:4", "dp=2,tp=8": "dp=2,tp=2", "comm.ranks_per_process=8": "comm.ranks_per_process=2"}
    words = [cards.pop(word, word) for word in container["args"]]
    if cards or numbered != ["RANK"]:
        sys.exit(f"{pods.name}: it lacks {list(cards)}, or {numbered} have the number of the pod")
    sets = [*MODEL.split(), f"training.steps={len(wanted)}", f"checkpoint.every={EVERY}", "comm.timeout_seconds=10"]
    command = [*container["command"], *words, *(word for one in sets for word in ("--set", one))]
    hosts = [f"{name}-{job['name']}-0-{at}" for at in range(spec["completions"])]
    made = [pods.add(host, f"{host}.{name}") for host in hosts]
    metrics, cache = pods.folder / f"{pods.name}-runs/metrics.jsonl", Path(tempfile.mkdtemp(dir=pods.folder))
    os.chmod(cache, 0o777)

    def ends(until):
        """Starts all pods, and kills the last one's process after so many steps. Their exit codes."""
        running = [pods.start(pod, of_pod, [f"RANK={at}", "XDG_CACHE_HOME=/cache"], [(cache, "/cache")], command) for at, pod in enumerate(made)]
        begun = time.monotonic()
        while any(process.poll() is None for process in running):
            if until and len(pods.losses.of(metrics)) >= until:
                os.kill(int(processes("gpt_train", pods.spaces[-1:])[0]), signal.SIGKILL)
                until = None
            if time.monotonic() - begun > LONGEST:
                sys.exit(f"{pods.name}: the pods do not end\n{pods.text(made[0])}\n{pods.text(made[-1])}")
            time.sleep(0.02)
        return [process.returncode for process in running]

    first, come = ends(EVERY + 2), len(pods.losses.of(metrics))
    if 0 in first or not EVERY < come < len(wanted) or "is lost (its process ended)" not in pods.text(made[0]):
        sys.exit(f"{pods.name}: ended with {first} after {come} steps\n{pods.text(made[0])}")
    second = ends(None)
    if any(second) or pods.losses.of(metrics) != wanted:
        sys.exit(f"{pods.name}: started again, ended with {second}, or with other losses\n{pods.text(made[0])}\n{pods.text(made[-1])}")
    print(f"{pods.name}: {len(made)} processes in as many pods, on emulated cards; one is killed after {come} steps, the other ends with {first[0]} and")
    print(f"    names it, and started again they have the losses of an uninterrupted run of threads in all {len(wanted)} steps")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=Path, default=ROOT / "target/release/examples", help="folder of gpt_train")
    args = parser.parse_args()
    try:
        import yaml
    except ImportError:
        skipped("there is no PyYAML")
    if 'VERSION_ID="12"' not in Path("/etc/os-release").read_text() or os.geteuid() != 0:
        skipped("this is not Debian 12, or not root")
    with tempfile.TemporaryDirectory(prefix="meshwork-pods-") as name:
        os.chmod(name, 0o755)
        losses, layer = Losses(args.programs, Path(name)), image(args.programs, Path(name))
        wanted = losses.by_threads(STEPS)
        for file, make in (("mpijob", mpi_job), ("jobset", job_set)):
            pods = Pods(Path(name), layer, losses, file)
            try:
                trains(pods, yaml.safe_load((ROOT / f"deploy/{file}.yaml").read_text()), make, wanted)
            finally:
                pods.remove()
        pods = Pods(Path(name), layer, losses, "jobset-gpus")
        try:
            trains_on_cards(pods, yaml.safe_load((ROOT / "deploy/jobset-gpus.yaml").read_text()), wanted[:EMULATED])
        finally:
            pods.remove()


if __name__ == "__main__":
    main()
