//! Mixtures of experts: how many there are, which layers have them, and how they are chosen.

use serde_json::Value;

use super::{Feed, LAYERS_MAX, WIDTH_MAX, unsupported};
use crate::checkpoint::json::Fields;
use crate::error::Result;
use crate::family::{Choice, Mixture, Shared};
use crate::program::{ExpertGroups, Routing};

const EXPERTS_MAX: usize = 1 << 12;
/// Of all layers together: where each is stored by itself, its three matrices are three names, made before a weight is looked for.
/// DeepSeek-V3 has 14,848, Kimi K2 23,040.
const EXPERTS_OF_ALL_LAYERS_MAX: usize = 1 << 17;
/// Of the matrices of all experts.
const ROWS_MAX: usize = 1 << 26;

/// The mixture of experts in every layer but the first ones.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Experts {
    pub count: usize,
    /// How many speak for a token.
    pub chosen: usize,
    pub routing: Routing,
    pub groups: Option<ExpertGroups>,
    /// Multiplies their weights.
    pub scale: f64,
    /// Added to the sum that they are divided by.
    pub sum_eps: f32,
    /// Width of an expert that speaks for every token.
    pub shared: Option<usize>,
    /// Width of what experts read and write, where it is not that of the residual stream.
    pub latent: Option<usize>,
    /// Width of the feed-forward part of layers without experts, if there are such.
    pub dense_width: usize,
}

impl Experts {
    /// The field with the width of the feed-forward part of a family that may have no experts, where it has none.
    pub(super) fn absent(fields: Fields<'_>, mixture: &Mixture) -> Result<Option<&'static str>> {
        let none = fields.value("num_local_experts").and_then(Value::as_u64) == Some(0);
        let off = match mixture.switch {
            Some(switch) => !fields.flag(switch)?.unwrap_or(false),
            None => false,
        };
        Ok(match mixture.shared {
            _ if off => Some(mixture.dense_inner),
            Shared::Halves(field) | Shared::Width(field) if mixture.optional && none => Some(field),
            _ => None,
        })
    }

    pub(super) fn parse(
        fields: Fields<'_>,
        mixture: &Mixture,
        hidden: usize,
        feeds: &[Feed],
    ) -> Result<Self> {
        let (name, count) = count(fields, mixture)?;
        let layers = feeds.iter().filter(|feed| **feed == Feed::Experts).count();
        if count * layers > EXPERTS_OF_ALL_LAYERS_MAX {
            let problem = format!(
                "is {count} in each of {layers} layers: together more than {EXPERTS_OF_ALL_LAYERS_MAX}"
            );
            return Err(fields.problem(name, problem));
        }
        let inner = fields.size(mixture.inner, WIDTH_MAX)?;
        if count.saturating_mul(2 * inner.max(hidden)) > ROWS_MAX {
            return Err(
                fields.problem(name, format!("is {count}: together they have more than {ROWS_MAX} rows"))
            );
        }
        let stated = named(fields, &["num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"])?;
        let (chosen_name, chosen) = stated.unwrap_or(("num_experts_per_tok", mixture.chosen));
        if chosen > count {
            return Err(fields.problem(chosen_name, format!("is {chosen}, but {name} is {count}")));
        }
        if mixture.choice == Choice::Top && chosen != 1 {
            let what = format!("{chosen} experts of a token (field `{chosen_name}`)");
            return Err(unsupported(fields, what, "one"));
        }
        if fields.flag("use_expert_bias")? == Some(false) {
            let what = "experts chosen without a bias (field `use_expert_bias`)".to_owned();
            return Err(unsupported(fields, what, "experts chosen with one"));
        }
        let shared = match mixture.shared {
            Shared::Never => None,
            Shared::Gated(field) | Shared::Beside(field) => Some(fields.size(field, WIDTH_MAX)?),
            Shared::Halves(field) | Shared::Width(field) => {
                fields.integer_opt(field, WIDTH_MAX)?.filter(|width| *width > 0)
            }
            Shared::Counted { field, .. } if fields.is_null(field) => None,
            Shared::Counted { field, absent } => {
                let experts = each_layers(fields, field, 0)?.unwrap_or(absent);
                if experts * inner > WIDTH_MAX {
                    let problem = format!("times {} = {inner} exceeds {WIDTH_MAX}", mixture.inner);
                    return Err(fields.problem(field, problem));
                }
                Some(experts * inner).filter(|width| *width > 0)
            }
        };
        Ok(Self {
            count,
            chosen,
            routing: routing(fields, mixture)?,
            groups: groups(fields, mixture, (name, count), chosen)?,
            scale: match mixture.scale {
                Some(absent) => fields.positive_opt("routed_scaling_factor")?.unwrap_or(absent),
                None => 1.0,
            },
            sum_eps: mixture.sum_eps,
            shared,
            latent: match mixture.latent {
                Some(field) => fields.integer_opt(field, WIDTH_MAX)?.filter(|width| *width > 0),
                None => None,
            },
            dense_width: match feeds.contains(&Feed::Dense) {
                true => fields.size(mixture.dense_inner, WIDTH_MAX)?,
                false => 0,
            },
        })
    }
}

/// Which layers have one feed-forward part, and which a mixture of experts.
pub(super) fn feeds(fields: Fields<'_>, mixture: &Mixture, layers: usize) -> Result<Vec<Feed>> {
    let some_dense = fields.list("mlp_only_layers")?.is_some_and(|list| !list.is_empty())
        || fields.size_opt("decoder_sparse_step", LAYERS_MAX)?.is_some_and(|step| step != 1);
    if some_dense {
        let what = "layers without experts (fields `mlp_only_layers`, `decoder_sparse_step`)".to_owned();
        return Err(unsupported(fields, what, "a mixture of experts in every layer"));
    }
    if mixture.interleaved {
        return interleaved(fields, layers);
    }
    let dense = match mixture.dense {
        Some(dense) => leading_dense(fields, dense, layers)?,
        None => 0,
    };
    Ok((0..layers).map(|layer| if layer < dense { Feed::Dense } else { Feed::Experts }).collect())
}

/// As `moe_layers` lists them, or `interleave_moe_layer_step` counts.
fn interleaved(fields: Fields<'_>, layers: usize) -> Result<Vec<Feed>> {
    let Some(list) = fields.list("moe_layers")? else {
        let every = fields.size_opt("interleave_moe_layer_step", LAYERS_MAX)?.unwrap_or(1);
        let feed = |layer: usize| if layer.is_multiple_of(every) { Feed::Experts } else { Feed::Dense };
        return Ok((1..=layers).map(feed).collect());
    };
    let mut feeds = vec![Feed::Dense; layers];
    for value in list {
        let at = value.as_u64().and_then(|at| feeds.get_mut(usize::try_from(at).ok()?));
        *at.ok_or_else(|| fields.problem("moe_layers", format!("names layer {value} of {layers}")))? =
            Feed::Experts;
    }
    Ok(feeds)
}

/// The number of experts, and the field that says it: today's name, that of transformers 4 for some families, or a family's own.
fn count(fields: Fields<'_>, mixture: &Mixture) -> Result<(&'static str, usize)> {
    let names = ["num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"];
    Ok(named(fields, &names)?.unwrap_or(("num_local_experts", mixture.count)))
}

/// What is stated under one of these names, and under which. All that are there must say the same.
fn named(fields: Fields<'_>, names: &[&'static str]) -> Result<Option<(&'static str, usize)>> {
    let mut found: Option<(&'static str, usize)> = None;
    for &name in names {
        let Some(stated) = each_layers(fields, name, 1)? else { continue };
        match found {
            Some((other, count)) if count != stated => {
                return Err(fields.problem(other, format!("is {count}, but {name} is {stated}")));
            }
            _ => found = found.or(Some((name, stated))),
        }
    }
    Ok(found)
}

/// An integer from `least` on, or a list of one per layer that are all the same.
fn each_layers(fields: Fields<'_>, name: &str, least: usize) -> Result<Option<usize>> {
    let Some(list) = fields.value(name).and_then(Value::as_array) else {
        return match least {
            0 => fields.integer_opt(name, EXPERTS_MAX),
            _ => fields.size_opt(name, EXPERTS_MAX),
        };
    };
    let first = list.first().and_then(Value::as_u64).and_then(|first| usize::try_from(first).ok());
    match first.filter(|first| (least..=EXPERTS_MAX).contains(first)) {
        Some(first) if list.iter().all(|value| value == &list[0]) => Ok(Some(first)),
        Some(_) => {
            let what = format!("layers that differ in field `{name}`");
            Err(unsupported(fields, what, "the same in every layer"))
        }
        None => Err(fields.problem(name, format!("must hold integers from {least} to {EXPERTS_MAX}"))),
    }
}

/// How many layers have one feed-forward part, all of them before the others.
fn leading_dense(fields: Fields<'_>, (field, absent): (&str, usize), layers: usize) -> Result<usize> {
    const SUPPORTED: &str = "dense layers before all others";
    for name in ["moe_layer_freq", "moe_layer_interval"] {
        if let Some(every) = fields.size_opt(name, LAYERS_MAX)?.filter(|every| *every != 1) {
            let what = format!("experts in one of {every} layers (field `{name}`)");
            return Err(unsupported(fields, what, SUPPORTED));
        }
    }
    let last = fields.value("moe_layer_end_index").and_then(Value::as_i64);
    if let Some(last) = last.filter(|last| *last != -1 && *last != layers as i64 - 1) {
        let what = format!("no experts behind layer {last} of {layers} (field `moe_layer_end_index`)");
        return Err(unsupported(fields, what, SUPPORTED));
    }
    let stated = fields.integer_opt(field, LAYERS_MAX)?;
    let Some(types) = fields.list("mlp_layer_types")? else {
        return Ok(stated.unwrap_or(absent).min(layers));
    };
    let is = |value: &Value, name: &str| value.as_str() == Some(name);
    let dense = types.iter().take_while(|value| is(value, "dense")).count();
    if types.len() != layers || !types[dense..].iter().all(|value| is(value, "sparse")) {
        let problem = format!("must name {layers} layers, `dense` ones and then `sparse` ones");
        return Err(fields.problem("mlp_layer_types", problem));
    }
    match stated.filter(|stated| *stated != dense) {
        Some(stated) => {
            let problem = format!("is {stated}, but mlp_layer_types begins with {dense} dense layers");
            Err(fields.problem(field, problem))
        }
        None => Ok(dense),
    }
}

fn routing(fields: Fields<'_>, mixture: &Mixture) -> Result<Routing> {
    let normalized = match mixture.normalized {
        Some((field, absent)) => fields.flag(field)?.unwrap_or(absent),
        None => true,
    };
    let scores = match mixture.choice {
        // Of one expert; what it reads is multiplied instead.
        Choice::Top => return Ok(Routing::AmongChosen),
        Choice::Logits => return Ok(if normalized { Routing::AmongChosen } else { Routing::AmongAll }),
        Choice::GroupedLogits => "softmax",
        Choice::BiasedSigmoids { .. } => "sigmoid",
        Choice::BiasedShares => return Ok(Routing::SharesAmongChosen),
    };
    if let Some(other) = fields.text("scoring_func")?.filter(|name| *name != scores) {
        let other: String = other.chars().take(60).collect();
        return Err(unsupported(
            fields,
            format!("scores of experts by `{other}` (field `scoring_func`)"),
            scores,
        ));
    }
    match (mixture.choice, normalized) {
        (Choice::BiasedSigmoids { .. }, true) => Ok(Routing::SigmoidAmongChosen),
        (Choice::BiasedSigmoids { .. }, false) => Ok(Routing::Sigmoid),
        (_, false) => Ok(Routing::AmongAll),
        // Those who compute it disagree: some then leave out the scale.
        (_, true) => {
            let what = "weights of experts that add up to one (field `norm_topk_prob`)".to_owned();
            Err(unsupported(fields, what, "weights as softmax gives them"))
        }
    }
}

fn groups(
    fields: Fields<'_>,
    mixture: &Mixture,
    (name, count): (&str, usize),
    chosen: usize,
) -> Result<Option<ExpertGroups>> {
    let method = |served: &'static [&'static str]| match fields.text("topk_method")? {
        Some(other) if !served.contains(&other) => {
            let other: String = other.chars().take(60).collect();
            let what = format!("experts chosen by `{other}` (field `topk_method`)");
            Err(unsupported(fields, what, &served.join(", ")))
        }
        method => Ok(method),
    };
    let (by_two, absent) = match mixture.choice {
        Choice::Logits | Choice::BiasedShares | Choice::Top => return Ok(None),
        Choice::GroupedLogits => match method(&["greedy", "group_limited_greedy"])? {
            Some("group_limited_greedy") => (false, None),
            _ => return Ok(None),
        },
        Choice::BiasedSigmoids { groups, kept } => {
            method(&["noaux_tc"])?;
            (true, Some((groups, kept)))
        }
    };
    let field = |name, absent: Option<usize>| match (fields.size_opt(name, EXPERTS_MAX)?, absent) {
        (Some(stated), _) => Ok(stated),
        (None, Some(absent)) => Ok(absent),
        (None, None) => Err(fields.problem(name, "is missing")),
    };
    let groups = field("n_group", absent.map(|absent| absent.0))?;
    let kept = field("topk_group", absent.map(|absent| absent.1))?;
    if groups > ExpertGroups::MOST {
        let problem = format!("is {groups}, expected an integer from 1 to {}", ExpertGroups::MOST);
        return Err(fields.problem("n_group", problem));
    }
    if !count.is_multiple_of(groups) {
        return Err(fields.problem("n_group", format!("is {groups}, which does not divide {name} = {count}")));
    }
    if kept > groups {
        return Err(fields.problem("topk_group", format!("is {kept}, but n_group is {groups}")));
    }
    let each = count / groups;
    if by_two && each < 2 {
        return Err(fields.problem("n_group", format!("is {groups}, for {count} experts: groups of one")));
    }
    if kept * each < chosen {
        let problem = format!("is {kept}: groups of {each} experts, of which {chosen} are to be chosen");
        return Err(fields.problem("topk_group", problem));
    }
    Ok((kept < groups).then_some(ExpertGroups { count: groups, kept, by_two }))
}
