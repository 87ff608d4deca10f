#include <epd/epd.h>
#include <stdio.h>

/* Every initialiser must be good C. */
int main(void) {
  epd_attach_options_t options = EPD_ATTACH_OPTIONS_INIT;
  epd_session_info_t info = EPD_SESSION_INFO_INIT;
  epd_group_config_t config = EPD_GROUP_CONFIG_INIT;
  epd_buffers_t buffers = EPD_BUFFERS_INIT;
  epd_resume_info_t resume = EPD_RESUME_INFO_INIT;
  epd_dispatch_args_t dispatch = EPD_DISPATCH_ARGS_INIT;
  epd_combine_args_t combine = EPD_COMBINE_ARGS_INIT;
  epd_result_t result = EPD_RESULT_INIT;
  epd_counts_t counts = EPD_COUNTS_INIT;
  epd_session_t* session = NULL;
  options.socket_path = "/nonexistent/epd.sock";
  if (epd_session_attach(&options, &session) != EPD_DAEMON_LOST || session != NULL) return 1;
  printf("%s\n", epd_version());
  return info.size + config.size + buffers.size + resume.size + dispatch.size + combine.size + result.size +
                     counts.size >
                 0
             ? 0
             : 1;
}
