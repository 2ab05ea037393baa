//! Flows come and go for long and at high rates: nothing is left of them, and nothing is taken from those
//! that are alive.

use tests::conntrack::churn::churn;

#[test]
#[ignore = "needs root"]
fn the_collector_never_removes_a_live_flow() -> anyhow::Result<()> {
    const CONNECTIONS: u32 = 50_000;
    let churned = churn(CONNECTIONS)?;
    println!("{churned:?}");
    assert_eq!(churned.wrong, 0, "{churned:?}");
    assert_eq!(churned.opened, 3 * u64::from(CONNECTIONS));
    // On a slow machine many connections come too late to be looked at, and few are opened in time.
    assert!(churned.looks > u64::from(CONNECTIONS), "{churned:?}");
    assert!(churned.removed > 0 && churned.reopened > 0, "{churned:?}");
    assert!(churned.fullest_percent > 80, "{churned:?}");
    Ok(())
}
