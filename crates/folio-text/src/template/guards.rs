//! The charges that `machine` puts between the engine's instructions, as filters that no template can name.
//!
//! Each takes the operands of an instruction, charges the meter for what that will make or walk, and gives them back: one
//! as itself, several as a tuple in reverse, which is how the engine unpacks onto its stack.

use minijinja::value::{Tuple, Value, ValueKind};
use minijinja::{Environment, Error, State};

use super::meter::{ELEMENT, Meter, Spent, elements, meter};

type Charge = fn(&mut Meter, &[Value]) -> Result<(), Spent>;

pub(super) fn add_to(environment: &mut Environment<'static>) {
    let pairs: [(&str, Charge); 6] = [
        ("!add", charge_add),
        ("!mul", charge_mul),
        ("!concat", charge_concat),
        ("!compare", charge_compare),
        ("!in", charge_in),
        ("!set", charge_set),
    ];
    for (name, charge) in pairs {
        let back = move |state: &mut State<'_, '_>, a: Value, b: Value| -> Result<Value, Error> {
            let operands = [a, b];
            charge(meter(state), &operands)?;
            let [a, b] = operands;
            Ok(Value::from(Tuple::from([b, a])))
        };
        environment.add_filter(name, back);
    }
    environment.add_filter(
        "!item",
        |state: &mut State<'_, '_>, a: Value, b: Value| -> Result<Value, Error> {
            let walked = if a.kind() == ValueKind::Iterable { elements(&a) } else { 0 };
            meter(state).work(a.as_str().map_or(walked, |text| text.len() / 16))?;
            Ok(Value::from(Tuple::from([b, a])))
        },
    );
    environment.add_filter("!slice", |state: &mut State<'_, '_>, a: Value, b: Value, c: Value, d: Value| {
        meter(state).make(elements(&a))?;
        Ok::<_, Error>(Value::from(Tuple::from(vec![d, c, b, a])))
    });
    environment.add_filter("!shallow", |state: &mut State<'_, '_>, values: minijinja::value::Rest<Value>| {
        let mut values = values.0;
        for value in &values {
            meter(state).make(elements(value).saturating_mul(ELEMENT))?;
        }
        values.reverse();
        Ok::<_, Error>(Value::from(Tuple::from(values)))
    });
    environment.add_filter("!walk", |state: &mut State<'_, '_>, value: Value| {
        let meter = meter(state);
        match value.as_str() {
            Some(text) => meter.work(text.len() / 16)?,
            // Their keys are listed first.
            None if value.kind() == ValueKind::Map => {
                meter.make(elements(&value).saturating_mul(ELEMENT / 2))?
            }
            None => {}
        }
        Ok::<_, Error>(value)
    });
    environment.add_filter("!unpack", |state: &mut State<'_, '_>, value: Value| {
        meter(state).make(elements(&value).saturating_mul(ELEMENT / 2))?;
        Ok::<_, Error>(value)
    });
    environment.add_filter("!asked", |state: &mut State<'_, '_>, value: Value| {
        meter(state).asked();
        value
    });
    environment.add_filter("!built", |state: &mut State<'_, '_>, value: Value| built(meter(state), value));
    environment.add_filter("!list", |state: &mut State<'_, '_>, value: Value| listed(meter(state), value));
}

/// A new list, tuple or mapping: not too deep, and without what could make a circle.
pub(super) fn built(meter: &mut Meter, value: Value) -> Result<Value, Error> {
    meter.make(elements(&value).saturating_mul(ELEMENT))?;
    if meter.measure(&value)?.has_namespace {
        return Err(Spent::Namespace.into());
    }
    Ok(value)
}

/// What the engine would compute again each time it is walked, as a list.
pub(super) fn listed(meter: &mut Meter, value: Value) -> Result<Value, Error> {
    if value.kind() != ValueKind::Iterable {
        return Ok(value);
    }
    let mut items = Vec::new();
    for item in value.try_iter()? {
        meter.make(ELEMENT)?;
        items.push(item);
    }
    Ok(Value::from(items))
}

fn charge_add(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    for value in operands {
        // Of lists, the references; numbers are nothing.
        match value.as_str() {
            Some(text) => meter.make(text.len())?,
            None => meter.make(elements(value).saturating_mul(ELEMENT))?,
        }
    }
    Ok(())
}

fn charge_mul(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    let [a, b] = operands else { return Ok(()) };
    let (repeated, times) = if a.is_number() { (b, a) } else { (a, b) };
    let size = match repeated.as_str() {
        Some(text) => text.len(),
        None => elements(repeated).saturating_mul(ELEMENT),
    };
    meter.make(size.saturating_mul(times.as_usize().unwrap_or(1)))
}

fn charge_concat(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    for value in operands {
        let bytes = printed(meter, value)?;
        meter.make(bytes)?;
    }
    Ok(())
}

/// Bytes of a value that is printed.
pub(super) fn printed(meter: &mut Meter, value: &Value) -> Result<usize, Spent> {
    match value.as_str() {
        Some(text) => Ok(text.len()),
        None => Ok(meter.measure(value)?.bytes),
    }
}

/// Comparing ends with the shorter one.
fn charge_compare(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    match operands {
        [a, b] if a.as_str().is_some() || b.as_str().is_some() => {
            meter.work(elements(a).min(elements(b)) / 16)
        }
        [a, b] if a.as_object().is_some() && b.as_object().is_some() => {
            meter.measure(a)?;
            meter.measure(b).map(drop)
        }
        _ => Ok(()),
    }
}

/// The second may have the first in it.
fn charge_in(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    let [a, b] = operands else { return Ok(()) };
    if b.as_str().is_some() {
        // What is looked for is printed where it is no text.
        let bytes = printed(meter, a)?;
        return meter
            .make(if a.as_str().is_some() { 0 } else { bytes })
            .and_then(|()| meter.work(elements(b) / 16));
    }
    match b.kind() {
        ValueKind::Map => meter.work(elements(a) / 16),
        // Each element is compared with the one looked for.
        _ if a.as_object().is_some() => {
            let nodes = meter.measure(a)?.nodes;
            meter.measure(b)?;
            meter.work(nodes.saturating_mul(elements(b)))
        }
        _ => meter.work(elements(b).saturating_mul(1 + elements(a) / 16)),
    }
}

/// The first becomes an attribute of the second.
fn charge_set(meter: &mut Meter, operands: &[Value]) -> Result<(), Spent> {
    let Some(value) = operands.first().filter(|value| value.as_object().is_some()) else { return Ok(()) };
    if meter.measure(value)?.has_namespace { Err(Spent::Namespace) } else { Ok(()) }
}
