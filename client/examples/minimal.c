/* The smallest program: one rank, whose tokens all come back to it. Needs a running daemon. */
#include <epd/epd.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  epd_session_t* session = NULL;
  epd_group_t* group = NULL;
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  config.name = "minimal";
  config.num_ranks = 1, config.num_experts = 4, config.max_tokens = 8, config.hidden = 128, config.topk = 1;
  if (epd_session_attach(NULL, &session) != EPD_OK || epd_group_join(session, &config, &group) != EPD_OK) {
    fprintf(stderr, "%s\n", epd_last_error());
    return 1;
  }
  epd_buffers_t b = EPD_BUFFERS_INIT;
  epd_group_buffers(group, 0, &b);
  memset(b.x, 0x3f, sizeof(uint16_t) * 8 * 128); /* 8 tokens of bf16 numbers, each for one expert */
  for (int t = 0; t < 8; ++t) ((int32_t*)b.topk_idx)[t] = t % 4, b.topk_weights[t] = 1.0f;

  epd_dispatch_args_t args = EPD_DISPATCH_ARGS_INIT;
  epd_result_t result = EPD_RESULT_INIT;
  epd_ticket_t ticket = 0;
  args.num_tokens = 8;
  epd_status_t status = epd_dispatch(group, &args, &ticket, NULL);
  if (status == EPD_OK) status = epd_ticket_wait(group, ticket, 5000, &result);
  if (status == EPD_OK) {
    printf("received %u rows\n", result.num_recv_rows);
  } else {
    fprintf(stderr, "%s\n", epd_last_error());
  }
  epd_group_leave(group);
  epd_session_detach(session);
  return status == EPD_OK && result.num_recv_rows == 8 ? 0 : 1;
}
