//! `pdp images`: images of registries and archives that the daemon keeps.

use std::process::ExitCode;

use pdp_api::client::Client;
use pdp_api::{ImageInfo, ImageQuery, PullRequest};

use crate::args::{self, Format, ImagesAction};
use crate::failure::CliFailure;
use crate::output::{ProgressDisplay, or_dash, print, report, table, write};

/// Digits shown of a digest.
const DIGITS: usize = 12;

pub async fn images(client: &Client, args: args::ImagesArgs) -> Result<ExitCode, CliFailure> {
    match args.action.unwrap_or(ImagesAction::List(args.list)) {
        ImagesAction::List(list) => print(list.format, &client.images().await?, |images| {
            if images.is_empty() {
                return "no images; a spec's `image: NAME` or `pdp images pull NAME` gets one\n"
                    .into();
            }
            let rows = images.iter().map(|image| {
                [
                    or_dash(image.tenant.clone().unwrap_or_default()),
                    or_dash(image.problem.clone().unwrap_or(image.names.join(", "))),
                    or_dash(digits(image)),
                    mebibytes(image.packed_bytes),
                    mebibytes(image.unpacked_bytes),
                    or_dash(image.used_by.join(", ")),
                ]
            });
            table(["TENANT", "IMAGE", "DIGEST", "SIZE", "UNPACKED", "USED BY"], rows.collect())
        }),
        ImagesAction::Pull { image, tenant } => {
            let mut shown = ProgressDisplay::new();
            let request = PullRequest { image, tenant };
            let result = client.pull_image(&request, |step| shown.step(step)).await;
            drop(shown);
            report(Format::Table, &result?)
        }
        ImagesAction::Rm { images, tenant } => {
            let query = ImageQuery { tenant };
            for image in images {
                client.delete_image(&image, &query).await?;
                write(format!("{image} is removed\n").as_bytes())?;
            }
            Ok(ExitCode::SUCCESS)
        }
        ImagesAction::Prune { tenant } => {
            let gone = client.prune_images(&ImageQuery { tenant }).await?;
            let bytes = gone.iter().map(|image| image.packed_bytes + image.unpacked_bytes).sum();
            let names = gone.iter().map(|image| match image.names.is_empty() {
                true => format!("{} is removed\n", digits(image)),
                false => format!("{} is removed\n", image.names.join(", ")),
            });
            let mut text: String = names.collect();
            text += &format!("{} removed, {} free\n", gone.len(), mebibytes(bytes));
            write(text.as_bytes())
        }
    }
}

fn digits(image: &ImageInfo) -> String {
    image.digest.trim_start_matches("sha256:").chars().take(DIGITS).collect()
}

pub fn mebibytes(bytes: u64) -> String {
    format!("{:.1}MiB", bytes as f64 / f64::from(1 << 20))
}
