"""What a check says of programs that fail, hang, or are not there: python3 -m unittest discover -s benches/gpu"""

import json
import os
import signal
import sys
import tempfile
import threading
import time
import unittest
from unittest import mock
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1])]
import check
import correct
import report
import speed
from session import Session

def steps_of(loss):
    step = {"event": "step", "loss": loss, "step_ms": 1.0}
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in [step] * 16 + [{"event": "end"}])


class Checks(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name)
        self.programs("gpt_train", f"cat <<E\n{steps_of(2.0)}E")

    def tearDown(self):
        self.folder.cleanup()

    def programs(self, name, text):
        path = self.path / name
        path.write_text(f"#!/bin/sh\ntrap '' INT\n{text}")
        path.chmod(0o755)

    def listing(self, text, *names):
        """A program that lists tests, and runs each by this."""
        listed = "".join(f"echo '{name}: test'; " for name in names or ["ops::norms"])
        self.programs("gpu", f'case "$*" in *--list*) {listed} exit 0;; esac\n{text}')

    def session(self, device="cuda", limit=20.0):
        return Session(check.ROOT, self.path, self.path, device, True, sys.executable, limit)

    def part(self, name, **session):
        return check.run(name, self.session(**session))

    def test_a_device_that_is_refused_skips_a_part_with_its_words(self):
        self.programs("gpt_train", "echo 'error: --device cuda: no CUDA driver found; use cpu' >&2; exit 2")
        for name in ["operations", "curves", "models-gpt2-124m-f32", "first"]:
            part = self.part(name)
            self.assertEqual((part["state"], part["why"]), ("SKIPPED", "--device cuda: no CUDA driver found; use cpu"), name)

    def test_a_program_that_is_not_packed_is_named(self):
        part = self.part("canonical")
        self.assertEqual(part["state"], "SKIPPED")
        self.assertIn("mesh_diff; scripts/gpu-pack.sh makes it", part["why"])

    def test_a_divergence_fails(self):
        self.programs("mesh_diff", "echo 'the first divergence: step 1, forward: output of operation #7'; exit 1")
        part = self.part("canonical")
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("operation #7", part["why"])

    def test_a_test_that_fails_fails(self):
        self.listing("echo 'test ops::norms ... FAILED'; echo 'test result: FAILED. 1 failed'; exit 101")
        part = self.part("operations", device="cuda")
        self.assertEqual(part["state"], "FAIL")

    def test_tests_run_apart_and_one_that_fails_says_whose_the_fault_is(self):
        self.listing(
            """case "$MESHWORK_LAUNCH_BLOCKING $*" in
            1*ops::norms*) echo "thread 'ops::norms' panicked at ops.rs:1:" >&2; echo 'kernel layer_norm failed' >&2; exit 101;;
            *ops::norms*) echo "thread 'ops::norms' panicked at ops.rs:1:" >&2; echo 'found at cuEventRecord' >&2; exit 101;;
            *ops::crash*) kill -SEGV $$;;
            *) echo 'test result: ok. 1 passed';;
            esac""",
            "ops::norms",
            "ops::crash",
            "ops::sums",
        )
        part = self.part("operations")
        states = {row["what"]: row["state"] for row in part["tables"]["tests"]}
        self.assertEqual(states, {"ops::norms": "FAIL", "ops::crash": "FAIL", "ops::sums": "PASS"})
        self.assertIn("found at cuEventRecord; waiting after each call: exit code 101; thread 'ops::norms' panicked at ops.rs:1: kernel layer_norm failed", part["why"])
        self.assertIn("ops::crash: signal SIGSEGV", part["why"])

    def test_a_part_that_crashes_names_itself_and_leaves_the_others_their_results(self):
        def crash(session):
            """Crashes while a program runs."""
            threading.Thread(target=lambda: session.run([session.program("gpt_train")]), daemon=True).start()
            while not list(session.folder.glob("running-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGSEGV)

        def fine(session):
            """Is fine."""
            session._there = "not there"
            return {"text": ["fine"]}

        self.programs("gpt_train", f"sleep 60 & echo $! > {self.path}/pid; wait")
        session = self.session()
        with mock.patch.dict(check.PARTS, {"steps": crash, "canonical": fine}):
            crashed, after = check.apart("steps", session), check.apart("canonical", session)
        self.assertEqual((crashed["state"], crashed["why"]), ("FAIL", "steps crashed: SIGSEGV"))
        self.assertEqual((after["state"], after["text"], session._there), ("PASS", ["fine"], "not there"))
        self.assertEqual(list(self.path.glob("running-*")), [], "no program is left")

    def test_tests_that_find_no_gpu_are_skipped(self):
        self.listing("echo 'SKIPPED: there is no GPU 0' >&2; echo 'test result: ok. 1 passed'")
        part = self.part("steps")
        self.assertEqual((part["state"], part["why"]), ("SKIPPED", "there is no GPU 0"))

    def test_a_program_that_hangs_is_ended_in_time(self):
        self.programs("mesh_diff", "sleep 60 & wait")
        part = self.part("canonical", limit=1.5)
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("was ended after", part["why"])
        self.assertLess(part["seconds"], 10)

    def test_a_loss_that_is_far_from_the_cpus_fails(self):
        self.programs("gpt_train", f'case "$*" in *"--device cpu"*) cat <<E\n{steps_of(2.0)}E\n;; *) cat <<E\n{steps_of(2.1)}E\n;; esac')
        part = self.part("curves")
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("5.00% from the CPU's loss", part["why"])

    def joins(self, loss, both="echo 'error: ncclCommInitRankConfig: ncclInvalidUsage: Duplicate GPU detected' >&2; exit 1"):
        """A gpt_train of which rank 0 writes metrics with this loss, in a mesh of processes on GPUs of their own."""
        metrics = f'''out=; for word in "$@"; do [ "$last" = --metrics ] && out=$word; last=$word; done
            cat > "$out" <<E\n{steps_of(loss)}E'''
        other = f'''case "${{RANK:+a rank}} $*" in "a rank"*"--device cuda:0 "*) {both};; esac
            case "$RANK" in 0) {metrics}\nexit 0;; ?*) exit 0;; esac'''
        self.programs("gpt_train", f"{other}\ncat <<E\n{steps_of(2.0)}E")
        self.listing("echo 'SKIPPED: 2 ranks over NCCL need as many GPUs' >&2; echo 'test result: ok. 1 passed'", "nccl::tree")

    def test_processes_that_train_otherwise_than_one_rank_fail(self):
        for loss, state in [(2.0, "PASS"), (2.5, "FAIL")]:
            self.joins(loss)
            with mock.patch("nccl.count", lambda session: 2):
                part = self.part("nccl")
            rows = {row["what"]: row["state"] for row in part["tables"]["over NCCL"]}
            self.assertEqual(part["state"], state, part["why"])
            self.assertEqual((rows["two processes on one GPU"], rows["nccl::tree"], rows["dp=2,tp=2"]), ("PASS", "SKIPPED", "SKIPPED"))
            self.assertEqual([rows[f"{mesh}, 2 processes"] for mesh in ["dp=2", "tp=2", "pp=2"]], [state] * 3)

    def test_bus_bandwidth_is_that_of_nccl_tests(self):
        self.joins(2.0)
        names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"]
        lines = [json.dumps({"operation": name, "way": "library", "ranks": 4, "bytes": 1 << 30, "ms": 8.0, "gb_per_s": 100.0}) for name in names]
        self.programs("nccl", "cat <<E\n" + "\n".join(lines) + "\nE")
        with mock.patch("nccl.count", lambda session: 4):
            rows = self.part("nccl")["tables"]["bandwidth"]
        self.assertEqual([row["bus GB/s"] for row in rows], [150.0, 75.0, 75.0, 75.0, 100.0, 100.0])
        self.programs("nccl", "echo 'error: ncclSystemError' >&2; exit 1")
        with mock.patch("nccl.count", lambda session: 4):
            part = self.part("nccl")
        self.assertEqual(part["tables"]["bandwidth"], [{"what": "bandwidth", "state": "FAIL", "why": "ncclSystemError"}])
        rows = self.part("nccl", device="cuda:0")["tables"]["bandwidth"]
        self.assertEqual(rows[0]["why"], "it takes two GPUs, and this check has 1")

    def test_two_processes_that_train_on_one_gpu_fail(self):
        self.joins(2.0, both="exit 0")
        part = self.part("nccl", device="cuda:0")
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("two processes on one GPU: they trained", part["why"])

    def test_a_finding_of_a_sanitizer_names_its_kernel(self):
        told = "========= Invalid __global__ write of size 4 bytes\n=========     at adamw+0x1d0 in optimizer.cu:20\n========= ERROR SUMMARY: 1 error"
        self.programs("gpu", "echo 'test result: ok. 1 passed'")
        self.programs("compute-sanitizer", f"cat <<E\n{told}\nE\nexit 99")
        with mock.patch("correct.tool", lambda name: str(self.path / name)):
            part = self.part("sanitizer")
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("memcheck: findings in adamw", part["why"])
        self.assertEqual(part["tables"]["kernels"][0]["first"], "Invalid __global__ write of size 4 bytes")
        self.assertEqual(list(correct.findings(["=====  Race reported", "=====     at 0x40 in norm.cu:3:rms_norm"])), ["rms_norm"])

    def test_graphs_that_change_a_loss_fail(self):
        end = '{"event":"end","launches":{"last_step":{"asked":9,"launches":2,"graphs":2,"changed":1,"new":0,"short":0,"refused":0}}}'
        on = steps_of(2.5).replace('{"event":"end"}', end)
        self.programs("gpt_train", f'case "$*" in *"cuda.graphs=true"*) cat <<E\n{on}E\n;; *) cat <<E\n{steps_of(2.0)}E\n;; esac')
        part = self.part("graphs")
        self.assertEqual((part["state"], part["why"]), ("FAIL", "4x16 f32: the losses are not those without graphs"))
        self.assertEqual(part["tables"]["steps"][1]["asked"], 9)

    def test_a_variant_whose_results_differ_fails(self):
        usual = '{"kernel":"dropout","size":9,"variant":"usual","ms":1.0,"of_usual":1.0}'
        wrong = '{"kernel":"dropout","size":9,"variant":"each=8","error":"differs by 2e-1 of the norm, and 0e0 is allowed"}'
        self.programs("tune", f"cat <<E\n{usual}\n{wrong}\nE\nexit 1")
        part = self.part("tune")
        self.assertEqual(part["state"], "FAIL")
        self.assertIn("dropout at 9: differs by 2e-1", part["why"])

    def test_a_form_that_stands_still_leaves_the_rows_of_the_others(self):
        usual = '{"kernel":"dropout","size":9,"variant":"usual","ms":1.0,"of_usual":1.0}'
        row = '[[sm_90a]]\\nkernel = "dropout"\\nvariant = "each=8"'
        self.programs("tune", f"printf '%b' '{row}' >{self.path}/tuning.toml; echo '{usual}'; sleep 60")
        part = self.part("tune", limit=2.5)
        self.assertEqual([row["state"] for row in part["tables"]["variants"]], ["FAIL", "PASS", "PASS"])
        self.assertIn("was ended after", part["why"])
        self.assertIn("each=8", part["files"]["tuning.toml"])

    def test_a_grouped_product_is_held_against_a_dense_one(self):
        line = '{{"operation":"{}","ms":{},"gb_per_s":1.0,"tflops":1.0,"flops":9}}'
        lines = [line.format("product nt bf16 6x8x16", 0.8), line.format("grouped 8 product nt bf16 6x8x16", 1.0)]
        self.programs("ops", "cat <<E\n" + "\n".join(lines) + "\nE")
        part = self.part("speed")
        self.assertIn("0.80 of a dense product, target 0.9", part["why"])

    def test_a_measured_card_is_a_file_that_the_planner_reads(self):
        told = ['{"device":"a card","memory_bytes":8000000000}', '{"operation":"broken","error":"it is not there"}']
        works = {"copy": 4e9, "upload": 1e8, "adamw 100": 1e9}
        told += [f'{{"operation":"{name}","ms":10.0,"bytes":{rate / 100:.0f},"flops":0,"gb_per_s":1.0,"tflops":0.0}}' for name, rate in works.items()]
        works = {"product nt f32 6x8x16": 1e12, "product nt bf16 6x8x16": 3e12, "product nn bf16 6x8x16": 4e12, "attention bf16 1x6x2x8": 1e12, "attention gradient bf16 1x6x2x8": 3e12}
        told += [f'{{"operation":"{name}","ms":10.0,"bytes":9,"flops":{rate / 100:.0f},"gb_per_s":1.0,"tflops":1.0}}' for name, rate in works.items()]
        self.programs("ops", "cat <<E\n" + "\n".join(told) + "\nE")
        part = self.part("speed", device="cuda-emulated")
        # crates/plan/tests/published/machine.rs reads the same file.
        self.assertEqual(part["files"]["card.toml"], (check.ROOT / "crates/plan/tests/fixtures/card.toml").read_text(encoding="utf-8"))
        without = [line for line in told if "upload" not in line]
        self.programs("ops", "cat <<E\n" + "\n".join(without) + "\nE")
        self.assertEqual(self.part("speed", device="cuda-emulated")["files"], {}, "a card without a rate")

    def test_a_fault_of_the_check_is_no_pass(self):
        self.programs("gpt_train", "echo '{\"event\":'")
        self.assertEqual(self.part("first")["state"], "FAIL")

    def test_targets_decide_on_gpus_alone(self):
        for device, state in [("cuda", "FAIL"), ("cuda-emulated", "PASS")]:
            row = {"what": "copy", "state": "PASS"}
            speed.judge(self.session(device), row, 0.5, 0.85, "of the copy rate")
            self.assertEqual(row["state"], state)

    def test_parts_are_chosen_by_their_beginnings(self):
        self.assertEqual(check.chosen(["models-llama", "steps"]), ["steps", "models-llama-1.3b-f32", "models-llama-1.3b-bf16"])
        self.assertEqual(check.chosen([]), list(check.PARTS))
        with self.assertRaises(SystemExit) as exit:
            check.chosen(["nothing"])
        self.assertIn("no part begins with nothing", str(exit.exception))

    def test_the_worst_row_is_the_part(self):
        rows = [{"what": "a", "state": "PASS"}, {"what": "b", "state": "SKIPPED", "why": "no torch"}]
        self.assertEqual(report.state(rows), ("PASS", "left out: b: no torch"))
        self.assertEqual(report.state(rows[1:]), ("SKIPPED", "b: no torch"))
        self.assertEqual(report.state([*rows, {"what": "c", "state": "FAIL", "why": "wrong"}]), ("FAIL", "c: wrong"))

    def test_reports_keep_the_parts_of_earlier_calls(self):
        path = self.path / "report"
        part = dict(state="PASS", why="", seconds=1.0, tables={"t": [{"what": "a|b"}]}, text=["x"], about="A part.")
        results = {"machine": {"device": "cuda"}, "date": "2026-01-01", "command": "c", "commit": "d", "parts": {"steps": part}}
        report.write(path, results)
        self.assertEqual(report.load(path)["parts"]["steps"]["state"], "PASS")
        text = path.with_name("report.md").read_text()
        self.assertIn("| steps | PASS | 1 |", text)
        self.assertIn("a/b", text)

    def test_operations_of_a_step_are_counted_as_they_are_published(self):
        size = dict(vocab_size=1000, num_layers=2, hidden_size=64, num_heads=4, seq_len=32, batch=3)
        self.assertEqual(speed.flops(size, {}), 96 * (6 * (12 * 2 * 64**2 + 1000 * 64) + 12 * 2 * 64 * 32))


if __name__ == "__main__":
    unittest.main()
