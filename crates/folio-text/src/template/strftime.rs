//! Python's `strftime` in the C locale, UTC.

use std::fmt::Write as _;

const DAYS: [&str; 7] = ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

/// A civil date and time.
struct Civil {
    year: i64,
    /// 1 to 12.
    month: i64,
    day: i64,
    /// 0 is Sunday.
    weekday: i64,
    /// 1 to 366.
    yearday: i64,
    /// Of the day.
    seconds: i64,
}

/// Days since 1970 of a date in the proleptic Gregorian calendar.
fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

fn civil(unix_s: i64) -> Civil {
    let days = unix_s.div_euclid(86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted_month + 2) / 5 + 1;
    let month = if shifted_month < 10 { shifted_month + 3 } else { shifted_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    Civil {
        year,
        month,
        day,
        weekday: (days + 4).rem_euclid(7),
        yearday: days - days_from_civil(year, 1, 1) + 1,
        seconds: unix_s.rem_euclid(86_400),
    }
}

/// A time as RFC 3339 writes it, for example `2023-11-14T22:13:20Z`.
pub fn rfc_3339(unix_s: i64) -> String {
    let c = civil(unix_s);
    let (hours, minutes, seconds) = (c.seconds / 3600, c.seconds / 60 % 60, c.seconds % 60);
    format!("{:04}-{:02}-{:02}T{hours:02}:{minutes:02}:{seconds:02}Z", c.year, c.month, c.day)
}

/// `Err` holds a directive that is not known.
pub(super) fn strftime(format: &str, unix_s: i64) -> Result<String, String> {
    let time = civil(unix_s);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let (padded, directive) = match chars.next() {
            Some('-') => (false, chars.next()),
            other => (true, other),
        };
        write_directive(&mut out, &time, padded, directive)?;
    }
    Ok(out)
}

fn write_directive(
    out: &mut String,
    time: &Civil,
    padded: bool,
    directive: Option<char>,
) -> Result<(), String> {
    let (hour, minute, second) = (time.seconds / 3600, time.seconds / 60 % 60, time.seconds % 60);
    let hour12 = (hour + 11) % 12 + 1;
    let day_name = DAYS[time.weekday as usize];
    let month_name = MONTHS[(time.month - 1) as usize];
    let mut number = |value: i64, width: usize| {
        let width = if padded { width } else { 1 };
        let _ = write!(out, "{value:0width$}");
    };
    match directive {
        Some('Y') => number(time.year, 1),
        Some('y') => number(time.year.rem_euclid(100), 2),
        Some('m') => number(time.month, 2),
        Some('d') => number(time.day, 2),
        Some('j') => number(time.yearday, 3),
        Some('H') => number(hour, 2),
        Some('I') => number(hour12, 2),
        Some('M') => number(minute, 2),
        Some('S') => number(second, 2),
        Some('w') => number(time.weekday, 1),
        Some('u') => number((time.weekday + 6) % 7 + 1, 1),
        Some('f') => out.push_str("000000"),
        Some('e') => {
            let _ = if padded { write!(out, "{:2}", time.day) } else { write!(out, "{}", time.day) };
        }
        Some('A') => out.push_str(day_name),
        Some('a') => out.push_str(&day_name[..3]),
        Some('B') => out.push_str(month_name),
        Some('b' | 'h') => out.push_str(&month_name[..3]),
        Some('p') => out.push_str(if hour < 12 { "AM" } else { "PM" }),
        Some('F') => {
            let _ = write!(out, "{}-{:02}-{:02}", time.year, time.month, time.day);
        }
        Some('T') => {
            let _ = write!(out, "{hour:02}:{minute:02}:{second:02}");
        }
        Some('Z') => out.push_str("UTC"),
        Some('z') => out.push_str("+0000"),
        Some('%') => out.push('%'),
        Some(other) => return Err(format!("%{other}")),
        None => return Err("% at the end".into()),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected values from CPython's `datetime.fromtimestamp(t, UTC).strftime`.
    #[test]
    fn dates_are_pythons() {
        let t = 1_721_952_000; // 2024-07-26 00:00:00
        assert_eq!(strftime("%d %b %Y", t).as_deref(), Ok("26 Jul 2024"));
        assert_eq!(
            strftime("%A, %B %-d, %Y %I:%M:%S %p, day %j", t).as_deref(),
            Ok("Friday, July 26, 2024 12:00:00 AM, day 208")
        );
        let t = 951_782_399 + 86_400; // 2000-02-29 23:59:59
        assert_eq!(
            strftime("%Y-%m-%d %H:%M:%S %a %j %y%%", t).as_deref(),
            Ok("2000-02-29 23:59:59 Tue 060 00%")
        );
        assert_eq!(strftime("%F %T %u %w %e", -1).as_deref(), Ok("1969-12-31 23:59:59 3 3 31"));
        assert_eq!(strftime("%Q", t), Err("%Q".into()));
        assert_eq!(strftime("100%", t), Err("% at the end".into()));
    }
}
