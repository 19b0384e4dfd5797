//! `folio doctor`: what this machine can do.

use anyhow::Result;
use folio_cpu::machine::Machine;
use serde_json::json;

use crate::cli::DoctorArgs;
use crate::{memory, units};

pub fn run(args: &DoctorArgs) -> Result<()> {
    if !args.json {
        eprintln!("measuring for about a second ...");
    }
    let machine = Machine::measure(None, None)?;
    let free = memory::free();
    if args.json {
        let report = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "isa": machine.isa.name(),
            "threads": machine.threads,
            "read_bytes_per_s": machine.read_bytes_per_s,
            "f32_flop_per_s": machine.f32_flop_per_s,
            "int8_op_per_s": machine.int8_op_per_s,
            "free_memory_bytes": free.as_ref().map(|free| free.bytes),
        });
        println!("{report:#}");
        return Ok(());
    }
    println!("instruction set   {}", machine.isa.name());
    println!("threads           {}", machine.threads);
    println!("read bandwidth    {:.1} GB/s", machine.read_bytes_per_s / 1e9);
    println!(
        "multiply rate     {:.0} GFLOP/s in f32 (a multiply-add counts as two)",
        machine.f32_flop_per_s / 1e9
    );
    println!("                  {:.0} Gop/s in bytes, for quantized weights", machine.int8_op_per_s / 1e9);
    if let Some(free) = free {
        println!("memory            {} {}", units::bytes(free.bytes), free.source);
    }
    println!();
    println!("What that means for decoding one sequence (every weight is read once per token):");
    println!("  parameters   bf16   Q8_0   Q4_0   tokens/s at most");
    for (name, parameters) in [("0.6 B", 0.6e9), ("1.2 B", 1.2e9), ("3 B", 3e9), ("8 B", 8e9)] {
        let rate = |bits: f64| machine.read_bytes_per_s / (parameters * bits / 8.0);
        println!("  {name:>10} {:6.1} {:6.1} {:6.1}", rate(16.0), rate(8.5), rate(4.5));
    }
    Ok(())
}
