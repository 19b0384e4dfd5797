//! `folio doctor --url`: what `GET /v1/why` of a running server says, in words.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::Value;

use crate::bench::table;
use crate::remote;
use crate::units;

/// Who is told by name of those with memory.
const TENANTS: usize = 8;

/// Asks the server and prints. `request`: about that one.
pub fn run(url: &str, key: Option<&str>, request: Option<&str>, as_json: bool) -> Result<()> {
    let query: Vec<(&str, &str)> = request.map(|id| ("request", id)).into_iter().collect();
    let answer = remote::get(url, key, "why", &query)?;
    match as_json {
        true => println!("{answer:#}"),
        false if request.is_some() => print!("{}", one(&answer)),
        false => print!("{}", text(&answer)),
    }
    Ok(())
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(0.0)
}

fn percent(value: &Value) -> String {
    value.as_f64().map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share))
}

fn money(value: &Value) -> String {
    value.as_f64().map_or("-".to_owned(), |price| format!("{price:.2}"))
}

fn size(value: &Value) -> String {
    units::bytes(value.as_u64().unwrap_or(0))
}

fn line(out: &mut String, what: &str, text: &str) {
    let _ = writeln!(out, "  {what:<9} {text}");
}

fn text(why: &Value) -> String {
    let mut out =
        format!("The last {:.0} s, {}:\n", number(&why["window_s"]), why["of"].as_str().unwrap_or("?"));
    if why["time"].is_object() {
        machine(&mut out, why);
    }
    let served = &why["served"];
    let targets = &served["targets"];
    line(
        &mut out,
        "served",
        &format!(
            "{} requests; first token in time (chat {} s, completions {} s) in {} of {}: {:.2}/s; {:.1} tokens/s",
            served["requests"],
            targets["chat_s"],
            targets["completion_s"],
            served["in_time"],
            served["first_tokens"],
            number(&served["goodput_per_s"]),
            number(&served["output_tokens_per_s"]),
        ),
    );
    if why["latency"].is_object() {
        latency(&mut out, &why["latency"]);
    }
    cache(&mut out, &why["cache"]);
    cost(&mut out, &why["cost"]);
    advice(&mut out, &why["advice"]);
    out
}

fn latency(out: &mut String, latency: &Value) {
    let told = [("first token", "time_to_first_token_s"), ("per output token", "time_per_output_token_s")];
    let told = told.map(|(words, name)| {
        let percentiles = ["p50", "p90", "p99"].map(|of| {
            latency[name][of].as_f64().map_or("-".to_owned(), |seconds| format!("{:.1}", 1000.0 * seconds))
        });
        format!("{words} {} ms", percentiles.join(", "))
    });
    line(out, "latency", &format!("{} (p50, p90, p99)", told.join("; ")));
}

fn machine(out: &mut String, why: &Value) {
    let time = &why["time"];
    let shares = ["prefill", "decode", "mixed", "waiting", "idle"];
    let shares: Vec<_> = shares.iter().map(|kind| format!("{kind} {}", percent(&time[*kind]))).collect();
    let mostly = time["mostly"].as_str().map_or(String::new(), |kind| format!("; steps are mostly {kind}"));
    line(out, "time", &format!("{}{mostly}", shares.join(", ")));
    let limits = &why["limits"];
    if let Some(reason) = limits["why"].as_str() {
        line(out, "limits", &format!("not known: {reason}"));
    }
    for kind in ["prefill", "decode", "mixed"] {
        let reached = &limits[kind];
        if let Some(by) = reached["limited_by"].as_str() {
            let (bandwidth, arithmetic) = (percent(&reached["bandwidth"]), percent(&reached["arithmetic"]));
            line(
                out,
                kind,
                &format!(
                    "{bandwidth} of the machine's bandwidth, {arithmetic} of its arithmetic; nearer to its {by}"
                ),
            );
        }
    }
    let batch = &why["batch"];
    let per_step = |name: &str| number(&batch[name]);
    line(
        out,
        "batch",
        &format!(
            "{:.1} of {} sequences and {:.1} of {} tokens in a step; {} preemptions, {} tokens computed again",
            per_step("sequences_per_step"),
            batch["sequences_max"],
            per_step("tokens_per_step"),
            batch["tokens_max"],
            batch["preemptions"],
            batch["recomputed_tokens"],
        ),
    );
    drafts(out, batch);
    let queue = &why["queue"];
    let reasons = queue["reasons"].as_object().into_iter().flatten();
    let reasons = reasons.filter(|(_, of)| number(&of["mean"]) > 0.0);
    let reasons: Vec<_> = reasons.map(|(name, of)| format!("{name} {:.1}", number(&of["mean"]))).collect();
    let reasons = if reasons.is_empty() {
        "nobody waited".to_owned()
    } else {
        format!("in the mean for {}", reasons.join(", "))
    };
    line(out, "queue", &format!("{} running, {} waiting; {reasons}", queue["running"], queue["waiting"]));
}

fn drafts(out: &mut String, batch: &Value) {
    let (drafts, right) = (number(&batch["draft_tokens"]), number(&batch["accepted_draft_tokens"]));
    if drafts > 0.0 {
        let share = 100.0 * right / drafts;
        line(out, "drafts", &format!("{drafts:.0} tokens, {right:.0} of them right ({share:.0} %)"));
    }
}

fn cache(out: &mut String, cache: &Value) {
    let bytes = &cache["bytes"];
    if !bytes.is_object() {
        let (active, cached) = (size(&cache["active_bytes"]), size(&cache["cached_bytes"]));
        line(
            out,
            "cache",
            &format!("{active} active, {cached} cached; hits {}", percent(&cache["hit_share"])),
        );
        return;
    }
    let lifetime = cache["lifetime_s"].as_f64();
    let lifetime =
        lifetime.map_or("nothing was evicted".to_owned(), |s| format!("content stays for {s:.0} s"));
    line(
        out,
        "cache",
        &format!(
            "{} active, {} cached, {} free; {} of active unused; hits {}; {lifetime}",
            size(&bytes["active"]),
            size(&bytes["cached"]),
            size(&bytes["free"]),
            percent(&cache["waste"]),
            percent(&cache["hit_share"]),
        ),
    );
    if let Some(unbounded) = cache["unbounded"]["hit_share"].as_f64() {
        let by_memory = cache["unbounded"]["by_memory"].as_array().into_iter().flatten();
        let sizes = by_memory
            .filter(|of| number(&of["hit_share"]) > 0.0)
            .map(|of| (number(&of["times"]), percent(&of["hit_share"])))
            .map(|(times, share)| format!(", one of {times} times the memory {share}"));
        let sizes: String = sizes.collect();
        line(out, "", &format!("a cache without bounds would hit {:.0} %{sizes}", 100.0 * unbounded));
    }
    tenants(out, &cache["tenants"]);
    tiers(out, cache);
}

/// Who has the memory, those with the most first.
fn tenants(out: &mut String, tenants: &Value) {
    let bytes = |(_, of): &(&String, &Value)| number(&of["active_bytes"]) + number(&of["cached_bytes"]);
    let mut all: Vec<_> = tenants.as_object().into_iter().flatten().collect();
    all.retain(|one| bytes(one) > 0.0);
    all.sort_by(|one, other| bytes(other).total_cmp(&bytes(one)));
    let others = all.len().saturating_sub(TENANTS);
    let told = all.iter().take(TENANTS).map(|(name, of)| {
        format!("{name} {} active and {} cached", size(&of["active_bytes"]), size(&of["cached_bytes"]))
    });
    let mut told: Vec<_> = told.collect();
    told.extend((others > 0).then(|| format!("and {others} more")));
    if !told.is_empty() {
        line(out, "of whom", &told.join("; "));
    }
}

/// What tiers hold and brought.
fn tiers(out: &mut String, cache: &Value) {
    let all = cache["tiers"].as_object().into_iter().flatten();
    let told = all.filter(|(_, of)| number(&of["bytes"]) + number(&of["loaded_tokens"]) > 0.0);
    let told = told.map(|(name, of)| {
        let brought = units::count(of["loaded_tokens"].as_u64().unwrap_or(0));
        let share = percent(&of["hit_share"]);
        format!("{name} holds {} and brought {brought} tokens, {share} of prompt tokens", size(&of["bytes"]))
    });
    let mut told: Vec<_> = told.collect();
    let loaded = cache["tokens"]["loaded_from_tiers"].as_u64().unwrap_or(0);
    told.extend((loaded > 0).then(|| format!("in all {} tokens were loaded", units::count(loaded))));
    if !told.is_empty() {
        line(out, "tiers", &told.join("; "));
    }
}

fn cost(out: &mut String, cost: &Value) {
    let row = |name: &str, cost: &Value| {
        vec![
            name.to_owned(),
            format!("{:.2}", number(&cost["seconds"])),
            percent(&cost["share"]),
            cost["computed_tokens"].to_string(),
            cost["cached_tokens"].to_string(),
            cost["output_tokens"].to_string(),
            money(&cost["per_million_computed"]),
            money(&cost["per_million_output"]),
        ]
    };
    let mut rows = vec![row("all", cost)];
    rows.extend(cost["tenants"].as_object().into_iter().flatten().map(|(name, of)| row(name, of)));
    let header = ["", "seconds", "of time", "computed", "cached", "output", "per M computed", "per M output"];
    let _ = write!(out, "\n{}", table::render(&header, &rows));
}

fn advice(out: &mut String, advice: &Value) {
    for (at, one) in advice.as_array().into_iter().flatten().enumerate() {
        let text = |name: &str| one[name].as_str().unwrap_or_default().to_owned();
        let _ = writeln!(out, "\n{}. {}\n   {}", at + 1, text("do"), text("because"));
        if let Some(costs) = one["costs"]["text"].as_str() {
            let _ = writeln!(out, "   Costs: {costs}");
        }
        for (what, name) in [("Gain", "gain"), ("Evidence", "evidence")] {
            let figures = figures(&one[name]);
            if !figures.is_empty() {
                let _ = writeln!(out, "   {what}: {}", figures.join(", "));
            }
        }
    }
}

/// Figures in words, those within others, too.
fn figures(of: &Value) -> Vec<String> {
    let told = of.as_object().into_iter().flatten();
    told.flat_map(|(name, value)| match value.is_object() {
        true => figures(value),
        false => vec![figure(name, value)],
    })
    .collect()
}

fn figure(name: &str, value: &Value) -> String {
    let count = || format!("{:.0}", number(value));
    let seconds = || format!("{:.3} s", number(value));
    match name {
        "prompt_tokens_share" => format!("{} of the prompt tokens computed now", percent(value)),
        "prompt_tokens" => format!("{} prompt tokens", count()),
        "recomputed_tokens" | "computed_again" => format!("{} tokens computed again", count()),
        "step_s" => format!("{} of steps", seconds()),
        "step_share" => format!("{} of their time", percent(value)),
        "load_s" => format!("{} of loading", seconds()),
        "sequences" => format!("{:.1} sequences in a step", number(value)),
        "sequences_max" => format!("at most {}", count()),
        "waiting" => format!("{:.1} waiting", number(value)),
        "drafts" => format!("up to {} drafts", count()),
        "tokens_per_step" => format!("{:.1} tokens a step", number(value)),
        "rows_per_step" => format!("{:.1} rows", number(value)),
        "row_s" | "sequence_s" => format!("{:.1} ms for each more", 1e3 * number(value)),
        "block_tokens" => format!("blocks of {} tokens", count()),
        "waste" => format!("{} of their slots never written", percent(value)),
        "times" => format!("{:.2} times as many tokens", number(value)),
        "bytes" => format!("{} of memory", units::bytes(number(value) as u64)),
        "evicted_blocks" => format!("{} blocks evicted", count()),
        "hit_share" => format!("hits {}", percent(value)),
        "hit_share_unbounded" => format!("without bounds {}", percent(value)),
        "preemptions" => format!("{} preemptions", count()),
        "tenant" => value.as_str().unwrap_or("?").to_owned(),
        "tokens" => format!("{} tokens", count()),
        "prompts" => format!("{} prompts", count()),
        "position" => format!("at token {}", count()),
        "tokens_behind" => format!("{} tokens behind it", count()),
        // Of a server that is newer than this.
        _ => format!("{} {value}", name.replace('_', " ")),
    }
}

fn one(request: &Value) -> String {
    let s = |name: &str| request[name].as_f64().map_or("-".to_owned(), |s| format!("{s:.3} s"));
    let mut out = format!(
        "{} ({}): {}\n",
        request["id"].as_str().unwrap_or("?"),
        request["kind"].as_str().unwrap_or("?"),
        request["state"].as_str().unwrap_or("?")
    );
    let (queue, prefill, decode) = (s("queue_s"), s("prefill_s"), s("decode_s"));
    line(
        &mut out,
        "time",
        &format!("queue {queue}, prompt {prefill}, output {decode}; in all {}", s("total_s")),
    );
    let tokens = |name: &str| request[name].to_string();
    line(
        &mut out,
        "tokens",
        &format!(
            "{} of the prompt, {} of them cached; {} of output",
            tokens("prompt_tokens"),
            tokens("cached_tokens"),
            tokens("output_tokens")
        ),
    );
    line(
        &mut out,
        "first",
        &format!("{} after the request, wanted within {}", s("time_to_first_token_s"), s("target_s")),
    );
    let waited = request["waited_s"].as_object().into_iter().flatten();
    let waited: Vec<_> = waited.map(|(name, of)| format!("{name} {:.3} s", number(of))).collect();
    let waited = if waited.is_empty() { "for nothing".to_owned() } else { waited.join(", ") };
    line(&mut out, "waited", &format!("{waited}; preempted {} times", request["preemptions"]));
    let compute = &request["compute"];
    line(
        &mut out,
        "compute",
        &format!(
            "{:.3} s of the steps for the prompt, {:.3} s for the output",
            number(&compute["prompt_s"]),
            number(&compute["output_s"])
        ),
    );
    out
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn all_that_the_report_has_is_said_where_there_is_some() {
        let none = text(&json!({"time": {}, "cache": {"bytes": {}, "tiers": {"disk": {"bytes": 0}}}}));
        for absent in ["drafts", "of whom", "tiers", "without bounds", "Gain", "Evidence"] {
            assert!(!none.contains(absent), "{absent}: {none}");
        }
        let held = |active: u64, cached: u64| json!({"active_bytes": active, "cached_bytes": cached});
        let mut tenants = json!({"small": held(0, 1024), "large": held(2048, 8192), "gone": held(0, 0)});
        let why = json!({
            "time": {},
            "batch": {"draft_tokens": 40, "accepted_draft_tokens": 30},
            "cache": {
                "bytes": {},
                "tokens": {"loaded_from_tiers": 4096},
                "tiers": {"host": {"bytes": 1_048_576, "loaded_tokens": 4096, "hit_share": 0.25}},
                "tenants": tenants,
                "unbounded": {"hit_share": 0.8, "by_memory": [{"times": 1.0, "hit_share": 0.0}, {"times": 1.5, "hit_share": 0.6}]},
            },
            "advice": [
                {
                    "do": "Give it more.", "because": "It is full.", "costs": {"text": "1 MiB more", "memory_bytes": 1_048_576},
                    "gain": {"prompt_tokens_share": 0.25, "prompt_tokens": 1234.4, "step_s": 0.4},
                    "evidence": {"times": 2.0, "bytes": 2_097_152.0, "cache": {"evicted_blocks": 7, "hit_share": 0.2, "hit_share_unbounded": 0.8}},
                },
                {
                    "do": "Let more run.", "because": "They wait.", "gain": {"step_s": 3.0, "step_share": 0.15},
                    "evidence": {"sequences": 7.9, "sequences_max": 8, "waiting": 3.0, "sequence_s": 0.0112},
                },
                {
                    "do": "Smaller.", "because": "It lacks.", "gain": {"step_s": 1.0},
                    "evidence": {"block_tokens": 16, "waste": 0.3},
                },
                {"do": "Mend it.", "because": "It breaks.", "evidence": {"tenant": "acme", "position": 37, "tokens_behind": 176.2, "new_one": 5}},
            ],
        });
        let told = text(&why);
        for part in [
            "40 tokens, 30 of them right (75 %)",
            "of whom   large 2.00 KiB active and 8.00 KiB cached; small 0 B active and 1.00 KiB cached\n",
            "host holds 1.00 MiB and brought 4,096 tokens, 25 % of prompt tokens; in all 4,096 tokens were loaded",
            "without bounds would hit 80 %, one of 1.5 times the memory 60 %\n",
            "25 % of the prompt tokens computed now",
            "1234 prompt tokens",
            "0.400 s of steps",
            "2.00 times as many tokens",
            "2.00 MiB of memory",
            "7 blocks evicted",
            "hits 20 %",
            "without bounds 80 %",
            "   Costs: 1 MiB more\n",
            "   Evidence: ",
            "Gain: 3.000 s of steps, 15 % of their time\n",
            "7.9 sequences in a step, at most 8, 3.0 waiting, 11.2 ms for each more\n",
            "blocks of 16 tokens, 30 % of their slots never written\n",
            "at token 37",
            "176 tokens behind it",
            "new one 5",
        ] {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert_eq!(told.matches("Gain: ").count(), 3, "whose gain is of everybody's figures: {told}");
        for at in 0..TENANTS {
            tenants[format!("t{at}")] = held(64, 0);
        }
        let mut many = String::new();
        super::tenants(&mut many, &tenants);
        assert!(many.contains("large") && many.contains("and 2 more"), "{many}");
    }

    #[test]
    fn what_is_not_known_is_said_and_what_is_is_told() {
        let why = json!({
            "of": "machine", "window_s": 55.2,
            "time": {"prefill": 0.25, "decode": 0.5, "mixed": 0.0, "waiting": 0.0, "idle": 0.25, "mostly": "decode"},
            "limits": {"known": false, "why": "no profile"},
            "batch": {"sequences_per_step": 2.5, "sequences_max": 64, "tokens_per_step": 9.0, "tokens_max": 512, "preemptions": 0, "recomputed_tokens": 0},
            "queue": {"running": 1, "waiting": 0, "reasons": {"capacity": {"mean": 0.5}}},
            "served": {"requests": 3, "targets": {"chat_s": 0.5, "completion_s": 0.1}},
            "latency": {"time_to_first_token_s": {"p50": 0.012, "p90": 0.0251, "p99": null}},
            "cache": {"bytes": {"active": 1024}, "lifetime_s": null},
            "cost": {"seconds": 41.4, "share": 0.75, "tenants": {"acme": {"seconds": 41.4}}},
        });
        let text = text(&why);
        for part in [
            "decode 50 %",
            "mostly decode",
            "not known: no profile",
            "2.5 of 64 sequences",
            "capacity 0.5",
            "first token 12.0, 25.1, - ms",
            "nothing was evicted",
            "acme",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        let one = one(
            &json!({"id": "x", "kind": "chat", "state": "stop", "queue_s": 0.25, "waited_s": {"capacity": 0.2}, "preemptions": 1}),
        );
        assert!(
            one.contains("queue 0.250 s") && one.contains("capacity 0.200 s; preempted 1 times"),
            "{one}"
        );
    }
}
